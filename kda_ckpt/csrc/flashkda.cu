// The three kernels: `prefill` (every output), and for segmented calls `segments` and `stitch` before it.
#include "common.cuh"
#include "factors.cuh"
#include "chain.cuh"
#include "stitch.cuh"

DEV void init_shared(u32 smem) {
    if (threadIdx.x < STAGES) {
        int s = threadIdx.x;
        mbar_init(bar_loaded(smem, s), GROUP_THREADS + 1);      // each thread's copies, and the tile's meta words
        mbar_init(bar_ready(smem, s), 1);
        mbar_init(bar_free(smem, s), CHAIN_WARPS);
        for (int i = 0; i < 8; ++i)                             // M above its diagonal blocks: zero, and never written again
            for (int j = 0; j < 4; ++j) sts32(smem + s * STAGE_BYTES + M_AT + i * SMALL_ROW + 16 + j * 4, 0);
    }
    if (threadIdx.x >= 32 && threadIdx.x < 32 + GROUPS * RING) {
        int i = threadIdx.x - 32;
        mbar_init(bar_normed(smem, i / RING, i), 1);
        mbar_init(bar_scaled(smem, i / RING, i), 4);            // the four warps of the group
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The row with the `rank`-th longest length: long rows start first, so that none is left over at the end.
DEV int row_of_rank(const Params &p, int rank, int *answer) {
    if (!p.sort_rows) return rank;
    #pragma unroll 1
    for (int n = threadIdx.x; n < p.N; n += blockDim.x) {
        int len = p.cu[n + 1] - p.cu[n], before = 0;
        #pragma unroll 4
        for (int m = 0; m < p.N; ++m) { int l = p.cu[m + 1] - p.cu[m]; before += l > len || (l == len && m < n); }
        if (before == rank) *answer = n;
    }
    __syncthreads();
    return *answer;
}

// One block: one segment of one row and head.
extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char bytes[];
    u32 smem = smem_addr(bytes);
    init_shared(smem);
    int head = blockIdx.x % p.H, unit = blockIdx.x / p.H;
    int row, segment = 0;
    if (!p.units) row = row_of_rank(p, unit, (int *)(bytes + MISC_AT));
    else if (!find_unit(p, unit, row, segment)) return;
    int row_begin = p.cu[row], row_end = p.cu[row + 1], begin = row_begin, end = row_end;
    if (p.units) { begin += segment * p.segment_len; end = min(begin + p.segment_len, row_end); }
    __syncthreads();
    if (threadIdx.x < CHAIN_WARPS * 32) {
        more_registers();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        Chain<true> chain(p, smem, warp, lane, head);
        long long at = ((long long)row * p.H + head) * HEAD * HEAD;
        if (segment > 0) {
            long long before = (long long)(unit - 1) * p.H + head;
            state_load(chain.S, p.local + before * HEAD * HEAD, warp, lane);
        } else if (p.h0) state_load(chain.S, p.h0 + at, warp, lane);
        else state_zero(chain.S);
        if (begin < end) chain.run(row, row_begin, true);
        if (end == row_end) state_store(chain.S, (char *)p.hT + at * (p.hT_bf16 ? 2 : 4), p.hT_bf16, warp, lane);
    } else {
        fewer_registers();
        Producer<true> producer(p, smem, threadIdx.x - CHAIN_WARPS * 32, head);
        producer.run(begin, end, row_begin, p.offsets ? p.offsets + row * p.C : nullptr, true, 0);
    }
}

// One block: the effect of one segment of one row and head on the state, as its end state from nothing (`local`) or as the
// matrix it multiplies the state with (`transfer`). Both first probe: if the transfer of the last PROBE tokens alone is below
// FORGOTTEN, nothing before them matters, and the local state starts there.
extern "C" __global__ void __launch_bounds__(THREADS, 1) segments(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char bytes[];
    u32 smem = smem_addr(bytes);
    float *norm2 = (float *)(bytes + MISC_AT);
    int head = blockIdx.x % p.H, unit = blockIdx.x / p.H % p.units, row, segment;
    bool is_transfer = blockIdx.x >= p.units * p.H;
    if (!find_unit(p, unit, row, segment) || (is_transfer && segment == 0)) return;
    int row_begin = p.cu[row], row_end = p.cu[row + 1];
    int begin = row_begin + segment * p.segment_len, end = begin + p.segment_len;
    if (end >= row_end) return;                                 // nothing follows this segment
    init_shared(smem);
    __syncthreads();
    bool probing = p.segment_len > PROBE;
    long long at = (long long)unit * p.H + head;
    if (threadIdx.x < CHAIN_WARPS * 32) {
        more_registers();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        Chain<false> chain(p, smem, warp, lane, head);
        bool forgotten = false;
        if (probing) {
            state_identity(chain.S, warp, lane);
            chain.run(row, row_begin, false);
            float sum = 0.f;
            #pragma unroll
            for (int m = 0; m < 2; ++m)
                #pragma unroll
                for (int t = 0; t < 16; ++t)
                    #pragma unroll
                    for (int c = 0; c < 4; ++c) sum += chain.S[m][t][c] * chain.S[m][t][c];
            #pragma unroll
            for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (lane == 0) norm2[warp] = sum;
            bar_sync(0, THREADS);
            float total = 0.f;
            for (int w = 0; w < CHAIN_WARPS; ++w) total += norm2[w];
            forgotten = total <= FORGOTTEN * FORGOTTEN;
        }
        if (is_transfer) {
            if (forgotten) return;
            state_identity(chain.S, warp, lane);
        } else if (segment == 0 && p.h0 && !forgotten) {
            long long h = ((long long)row * p.H + head) * HEAD * HEAD;
            state_load(chain.S, p.h0 + h, warp, lane);
        } else state_zero(chain.S);
        chain.run(row, row_begin, !is_transfer);
        state_store(chain.S, (is_transfer ? p.transfer : p.local) + at * HEAD * HEAD, false, warp, lane);
        if (!is_transfer && threadIdx.x == 0) p.forgotten[at] = forgotten;
    } else {
        fewer_registers();
        Producer<false> producer(p, smem, threadIdx.x - CHAIN_WARPS * 32, head);
        int tiles = 0;
        bool forgotten = false;
        if (probing) {
            tiles = producer.run(end - PROBE, end, row_begin, nullptr, false, 0);
            bar_sync(0, THREADS);
            float total = 0.f;
            for (int w = 0; w < CHAIN_WARPS; ++w) total += norm2[w];
            forgotten = total <= FORGOTTEN * FORGOTTEN;
        }
        if (is_transfer && forgotten) return;
        producer.run(forgotten ? end - PROBE : begin, end, row_begin, nullptr, !is_transfer, tiles);
    }
}

extern "C" __global__ void __launch_bounds__(256) stitch(const __grid_constant__ Params p) {
    __shared__ float S[16][STITCH_ROW];
    int pair = blockIdx.x / 8;
    stitch_rows(p, S, pair / p.H, pair % p.H, (blockIdx.x % 8) * 16);
}
