// The words every other file uses: sizes, the parameter block, the shared-memory map, and one-line wrappers for PTX.
// No header of any toolkit is included, so NVRTC can build this from three strings.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int HEAD = 128;              // D = K = V
constexpr int TILE = 16;               // tokens in a tile
constexpr int STAGES = 10;             // tiles in flight in shared memory, five for each producer group
constexpr int CHAIN_WARPS = 4;         // of one chain: each owns 32 rows of V, and all 128 columns of K, of the state
constexpr int GROUPS = 2;              // producer groups of four warps; group p makes the tiles t with t % 2 == p
constexpr int GROUP_THREADS = 128;
constexpr int RING = 4;                // tiles of a group between being scaled and being solved
constexpr int LOAD_AHEAD = 3;          // a group fetches this many of its own tiles ahead
constexpr int PROBE = 32;              // tokens of the warm-up that may prove a segment forgotten
constexpr float FORGOTTEN = 1.52587890625e-5f;   // 2^-16: bound on the Frobenius norm of the warm-up's transfer
constexpr float LOG2E = 1.4426950408889634f;

// Mirrored by kda_ckpt.cuda_kda.Params. Token strides are in bytes; a token's heads lie side by side.
struct Params {
    const u16 *q, *k, *v, *g;          // bf16 [T, H, 128]
    const void *beta;                  // [T, H] bf16, or float32 if beta_f32
    const float *A_log, *dt_bias;      // [H], [H, 128]
    const int *cu;                     // [N + 1]
    const float *h0;                   // [N, H, V, K] or null
    void *hT;                          // [N, H, V, K]
    const int *offsets;                // [N, C] or null
    void *checkpoints;                 // [N, C, H, V, K]
    u16 *out;                          // bf16 [T, H, 128]
    float *local, *transfer;           // [units, H, 128, 128]: what each segment adds to the state, and multiplies it with
    int *forgotten;                    // [units, H]
    u32 q_stride, k_stride, v_stride, g_stride, out_stride, beta_stride;
    int N, H, C, units, segment_len, sort_rows;   // units: bound on the segments of all rows, 0 = rows are not cut
    int beta_f32, hT_bf16, checkpoints_bf16;
    float lower_bound;
};

// ---- shared memory -------------------------------------------------------------------------------------------------
// A stage holds one tile. Its four 16 x 128 bf16 buffers arrive raw and are overwritten where they lie:
//     q -> q e^G      k -> k e^G      g -> k e^(G_end - G)      v -> the tile's output
// then M = (I + diag(beta) A)^-1 diag(beta), P = tril(q k^T with decay), and e^(G_end).
constexpr u32 TILE_BYTES = TILE * HEAD * 2;
constexpr u32 Q_AT = 0, K_AT = TILE_BYTES, G_AT = 2 * TILE_BYTES, V_AT = 3 * TILE_BYTES;
constexpr u32 SMALL_ROW = 48;          // bytes between rows of a 16 x 16 bf16 matrix: 3 chunks, so ldmatrix sees 8 banks
constexpr u32 M_AT = 4 * TILE_BYTES, P_AT = M_AT + TILE * SMALL_ROW, DECAY_AT = P_AT + TILE * SMALL_ROW;
constexpr u32 META_AT = DECAY_AT + HEAD * 4;
constexpr u32 STAGE_BYTES = META_AT + 128;
constexpr u32 KF_AT = STAGES * STAGE_BYTES;                        // k e^-G, RING per group
constexpr u32 X_ROW = 20 * 4;                                      // a solver's scratch: 16 x 16 fp32, rows padded to 20
constexpr u32 X_BYTES = TILE * X_ROW;
constexpr u32 X_AT = KF_AT + GROUPS * RING * TILE_BYTES;           // one per producer warp
constexpr u32 NORM_AT = X_AT + GROUPS * 4 * X_BYTES;               // [group][RING][q, k][16] fp32
constexpr u32 BARRIER_AT = NORM_AT + GROUPS * RING * 2 * TILE * 4;
constexpr u32 MISC_AT = BARRIER_AT + (3 * STAGES + 2 * GROUPS * RING + 1) * 8;
constexpr u32 SMEM_BYTES = 226 * 1024;                             // what a launch asks for
static_assert(MISC_AT + 64 <= SMEM_BYTES, "the map above must fit");

struct Meta { int first, tokens, last, cut; };                     // token range of the tile, and what ends with it

// A chain thread holds 128 numbers of the state, so it gets more of the registers that the block starts with (LAUNCH a thread)
// than a producer. Asking for more than there are would wait for ever.
template <int CHAINS, int CHAIN, int PRODUCER> struct Block {
    static constexpr int CHAIN_THREADS = CHAINS * CHAIN_WARPS * 32, THREADS = CHAIN_THREADS + GROUPS * GROUP_THREADS;
    static constexpr int LAUNCH = 65536 / THREADS / 8 * 8;      // what __launch_bounds__(THREADS, 1) allows
    static_assert(CHAIN_THREADS * CHAIN + GROUPS * GROUP_THREADS * PRODUCER <= THREADS * LAUNCH, "registers");
    static __device__ __forceinline__ void be_chain() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CHAIN)); }
    static __device__ __forceinline__ void be_producer() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER)); }
};
using PrefillBlock = Block<1, 232, 136>;                        // one chain, outputs
using HalfBlock = Block<1, 168, 168>;                           // one chain over half of V
using SegmentBlock = Block<2, 168, 88>;                         // two chains over the same tiles: local state and transfer

// ---- PTX -----------------------------------------------------------------------------------------------------------
#define DEV __device__ __forceinline__

DEV u32 smem_addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float rsqrt_fast(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float bf16_lo(u32 x) { return __uint_as_float(x << 16); }
DEV float bf16_hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }
DEV u32 pack(float lo, float hi) {                                 // two floats to bf16x2, lo in the low half
    u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y;
}
DEV u32 once(u32 x) { asm volatile("" : "+r"(x)); return x; }            // keeps the compiler from computing x anew in a loop
template <typename T> DEV T *once(T *x) { asm volatile("" : "+l"(x)); return x; }
DEV const char *wide(u32 token, u32 stride, const char *base) {    // base + token * stride, in one instruction
    const char *x; asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(x) : "r"(token), "r"(stride), "l"(base)); return x;
}
DEV float sigmoid(float x) { return rcp(1.f + ex2(-LOG2E * x)); }

// One word at a time: a paired load, or a second way to come by a value (bf16, say), and the chain's loop would move the
// whole state into the register quads its mma wants, 52 moves a tile.
DEV float ldg_f(const float *p) { float x; asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p)); return x; }

DEV u32 lds32(u32 a) { u32 x; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(a)); return x; }
DEV float lds_f(u32 a) { float x; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(a)); return x; }
DEV float2 lds_f2(u32 a) { float2 x; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(a)); return x; }
DEV float4 lds_f4(u32 a) {
    float4 x; asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(a)); return x;
}
DEV uint4 lds_u4(u32 a) {
    uint4 x; asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(a)); return x;
}
DEV void sts32(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(a), "r"(x) : "memory"); }
DEV void sts16(u32 a, u16 x) { asm volatile("st.shared.b16 [%0], %1;" :: "r"(a), "h"(x) : "memory"); }
DEV void sts_f(u32 a, float x) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(a), "f"(x) : "memory"); }
DEV void sts_f2(u32 a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(a), "f"(x), "f"(y) : "memory"); }

// Four 8x8 bf16 matrices; lane i names a row of matrix i / 8. With .trans each comes out transposed.
DEV void ldsm(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
DEV void ldsm_t(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
DEV void stsm(u32 a, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" :: "r"(a), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
DEV void stsm_t(u32 a, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" :: "r"(a), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
// c[16 x 8] += a[16 x 16] b[16 x 8], bf16 operands, fp32 sums. Lane l holds c at rows l/4, l/4 + 8, columns 2 (l % 4) + {0, 1}.
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV u32 tf32(float x) { u32 y; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }

DEV void cp_async16(u32 to, const void *from, bool valid) {        // 16 bytes, or 16 zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEV void mbar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
// A warp arrives through its lane 0, after __syncwarp. compute-sanitizer's racecheck credits an arrival to the arriving thread
// alone, so its build has every lane arrive.
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
DEV void mbar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory"); }
DEV void warp_arrive(u32 bar, int lane) { __syncwarp(); if (lane < WARP_ARRIVALS) mbar_arrive(bar); }
DEV void mbar_arrive_when_copied(u32 bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(bar) : "memory"); }
DEV void mbar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra W;\n}" :: "r"(bar), "r"(parity) : "memory");
}
// Programmatic dependent launch: the next kernel's blocks may start once every block here has said so; they wait, before they
// touch what this kernel writes, until it has ended.
DEV void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEV void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A tile's life: loaded (raw) -> normed (1 / |q|, 1 / |k| known) -> scaled -> ready (M and P made) -> free.
DEV u32 bar_loaded(u32 smem, int stage) { return smem + BARRIER_AT + stage * 8; }
DEV u32 bar_ready(u32 smem, int stage) { return smem + BARRIER_AT + (STAGES + stage) * 8; }
DEV u32 bar_free(u32 smem, int stage) { return smem + BARRIER_AT + (2 * STAGES + stage) * 8; }
DEV u32 bar_normed(u32 smem, int group, int n) { return smem + BARRIER_AT + (3 * STAGES + group * RING + n % RING) * 8; }
DEV u32 bar_scaled(u32 smem, int group, int n) { return smem + BARRIER_AT + (3 * STAGES + (GROUPS + group) * RING + n % RING) * 8; }

DEV u32 bar_probed(u32 smem) { return smem + BARRIER_AT + (3 * STAGES + 2 * GROUPS * RING) * 8; }

// Rows of a tile are 256 bytes = 16 chunks. Chunk c of row r lies at chunk c ^ swizzle(r): eight consecutive rows spread
// over the eight bank groups (ldmatrix), and rows r and r + 8 differ by half of them (the producers read both at once).
DEV u32 swizzle(u32 row) { return (row & 7) ^ ((row >> 3) << 2); }
DEV u32 chunk_at(u32 row, u32 chunk) { return row * 256 + ((chunk ^ swizzle(row)) << 4); }

// Lane addresses for ldmatrix.x4 on 16 x 16 of a tile: columns 16 kk .. 16 kk + 15 of all tokens. Matrices in registers:
//   RowsFirst     (tokens 0-7, chunk 0) (tokens 8-15, chunk 0) (tokens 0-7, chunk 1) (tokens 8-15, chunk 1)
//   ChunksFirst   (tokens 0-7, chunk 0) (tokens 0-7, chunk 1) (tokens 8-15, chunk 0) (tokens 8-15, chunk 1)
// An mma's A operand, and with .trans its two B operands (k = token), want the first; two B operands (n = token) the second.
struct LaneTile {
    u32 base;
    DEV u32 at(u32 tile, int kk) const { return ((tile + base) ^ ((kk & 3) << 5)) + ((kk >> 2) << 7); }
};
struct RowsFirst : LaneTile { DEV explicit RowsFirst(int lane) { base = chunk_at(lane & 15, lane >> 4); } };
struct ChunksFirst : LaneTile { DEV explicit ChunksFirst(int lane) { base = chunk_at((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1); } };
DEV u32 small_rows_first(int lane) { return (lane & 15) * SMALL_ROW + (lane >> 4) * 16; }
DEV u32 small_chunks_first(int lane) { return ((lane & 7) + ((lane >> 4) << 3)) * SMALL_ROW + ((lane >> 3) & 1) * 16; }
