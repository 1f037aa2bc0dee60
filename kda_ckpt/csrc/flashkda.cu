// The three kernels: `prefill` (every output), and for segmented calls `segments` and `stitch` before it.
#include "common.cuh"
#include "factors.cuh"
#include "chain.cuh"
#include "stitch.cuh"

DEV void init_shared(u32 smem, int chains) {
    if (threadIdx.x < STAGES) {
        int s = threadIdx.x;
        mbar_init(bar_loaded(smem, s), GROUP_THREADS + 1);      // each thread's copies, and the tile's meta words
        mbar_init(bar_ready(smem, s), WARP_ARRIVALS);
        mbar_init(bar_free(smem, s), chains * CHAIN_WARPS * WARP_ARRIVALS);
        for (int i = 0; i < 8; ++i)                             // M above its diagonal blocks: zero, and never written again
            for (int j = 0; j < 4; ++j) sts32(smem + s * STAGE_BYTES + M_AT + i * SMALL_ROW + 16 + j * 4, 0);
    }
    if (threadIdx.x >= 32 && threadIdx.x < 32 + GROUPS * RING) {
        int i = threadIdx.x - 32;
        mbar_init(bar_normed(smem, i / RING, i), WARP_ARRIVALS);
        mbar_init(bar_scaled(smem, i / RING, i), 4 * WARP_ARRIVALS);    // the four warps of the group
    }
    if (threadIdx.x == 64) mbar_init(bar_probed(smem), CHAIN_WARPS * WARP_ARRIVALS);
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

// One block: the outputs of one segment of one row and head (of the whole row when rows are not cut), for all of V or half.
template <typename Block, int ROWS> DEV void prefill_block(const Params &p, char *bytes) {
    u32 smem = smem_addr(bytes);
    init_shared(smem, 1);
    constexpr int SPLIT = 32 / ROWS;
    int item = blockIdx.x / SPLIT, head = item % p.H, unit = item / p.H, part = blockIdx.x % SPLIT;
    int row, segment = 0;
    if (!p.units) row = row_of_rank(p, unit, (int *)(bytes + MISC_AT));
    else if (!find_unit(p, unit, row, segment)) return;
    int row_begin = p.cu[row], row_end = p.cu[row + 1], begin = row_begin, end = row_end;
    if (p.units) { begin += segment * p.segment_len; end = min(begin + p.segment_len, row_end); }
    __syncthreads();
    if (threadIdx.x < Block::CHAIN_THREADS) {
        Block::be_chain();
        int warp = part * CHAIN_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
        Chain<true, ROWS> chain(p, smem, warp, lane, head);
        long long at = ((long long)row * p.H + head) * HEAD * HEAD;
        if (p.units) wait_for_previous();                       // the stitch; the producers are at work meanwhile
        if (segment > 0) state_load<ROWS>(chain.S, p.local + ((long long)(unit - 1) * p.H + head) * HEAD * HEAD, warp, lane);
        else if (p.h0) state_load<ROWS>(chain.S, p.h0 + at, warp, lane);
        else state_zero<ROWS>(chain.S);
        if (begin < end) chain.run(row, row_begin, true);
        if (end == row_end) state_store<ROWS>(chain.S, (char *)p.hT + at * (p.hT_bf16 ? 2 : 4), p.hT_bf16, warp, lane);
    } else {
        Block::be_producer();
        Producer<true> producer(p, smem, threadIdx.x - Block::CHAIN_THREADS, head, part, SPLIT);
        producer.run(begin, end, -1, row_begin, p.offsets ? p.offsets + row * p.C : nullptr, []() { return false; });
    }
}
extern "C" __global__ void __launch_bounds__(PrefillBlock::THREADS, 1) prefill(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char bytes[];
    prefill_block<PrefillBlock, 32>(p, bytes);
}
extern "C" __global__ void __launch_bounds__(HalfBlock::THREADS, 1) prefill_half(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char bytes[];
    prefill_block<HalfBlock, 16>(p, bytes);
}

// One block: what one segment of one row and head does to the state. Of its two chains the first finds the state that the
// segment's own tokens leave (`local`), the second the matrix it multiplies an incoming state with (`transfer`).
// Both walk the last PROBE tokens first: if their transfer alone is below FORGOTTEN, nothing before them matters and the
// local state is already found. A row's first segment has no need of a transfer: it starts from the true state.
extern "C" __global__ void __launch_bounds__(SegmentBlock::THREADS, 1) segments(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char bytes[];
    u32 smem = smem_addr(bytes);
    const float *norm2 = (const float *)(bytes + MISC_AT);
    int head = blockIdx.x % p.H, unit = blockIdx.x / p.H, row, segment;
    if (!find_unit(p, unit, row, segment)) return;
    int row_begin = p.cu[row], begin = row_begin + segment * p.segment_len, end = begin + p.segment_len;
    if (end >= p.cu[row + 1]) return;                           // nothing follows this segment
    init_shared(smem, 2);
    let_next_start();
    __syncthreads();
    int probe = max(begin, end - PROBE);
    auto forgotten = [&]() {
        mbar_wait(bar_probed(smem), 0);
        return norm2[0] + norm2[1] + norm2[2] + norm2[3] <= FORGOTTEN * FORGOTTEN;
    };
    if (threadIdx.x < SegmentBlock::CHAIN_THREADS) {
        SegmentBlock::be_chain();
        int warp = threadIdx.x / 32 % CHAIN_WARPS, lane = threadIdx.x % 32;
        bool is_transfer = threadIdx.x >= CHAIN_WARPS * 32;
        long long at = (long long)unit * p.H + head, pair = (long long)row * p.H + head;
        Chain<false, 32> chain(p, smem, warp, lane, head);
        if (is_transfer) state_identity<32>(chain.S, warp, lane); else state_zero<32>(chain.S);
        chain.run(row, row_begin, !is_transfer);
        if (is_transfer) {
            float sum = chain.norm2();
            if (lane == 0) sts_f(smem + MISC_AT + warp * 4, sum);
            warp_arrive(bar_probed(smem), lane);
        }
        bool done = forgotten();
        if (!done) {
            if (is_transfer) state_identity<32>(chain.S, warp, lane);
            else if (segment == 0 && p.h0) state_load<32>(chain.S, p.h0 + pair * HEAD * HEAD, warp, lane);
            else state_zero<32>(chain.S);
            chain.run(row, row_begin, !is_transfer);
        }
        if (!is_transfer) state_store<32>(chain.S, p.local + at * HEAD * HEAD, false, warp, lane);
        else if (!done) state_store_transposed<32>(chain.S, p.transfer + at * HEAD * HEAD, warp, lane);
        if (threadIdx.x == 0) p.forgotten[at] = done;
    } else {
        SegmentBlock::be_producer();
        Producer<false> producer(p, smem, threadIdx.x - SegmentBlock::CHAIN_THREADS, head, 0, 1);
        producer.run(begin, end, probe, row_begin, nullptr, forgotten);
    }
}

extern "C" __global__ void __launch_bounds__(256) stitch(const __grid_constant__ Params p) {
    __shared__ __align__(16) float S[16][STITCH_ROW];
    let_next_start();
    wait_for_previous();
    int pair = blockIdx.x / 8;
    stitch_rows(p, S, pair / p.H, pair % p.H, (blockIdx.x % 8) * 16);
}
