// The chain: four warps walk the tiles in order, each with its own rows of the state in registers (fp32), never
// talking to another. For one tile, transposed so that V rows are the matrix rows and no operand is ever moved:
//     W = S K~^T        R = V^T - W        U = R M^T        O = S Q~^T + U P^T        S = S diag(e^G_end) + U K^
// (K~ = k e^G, Q~ = q e^G, K^ = k e^(G_end - G)). The accumulator layout of one product, rounded to bf16, is the
// left operand layout of the next: S, R and U go from sums to operands in place. Every right operand that is loaded
// serves two products, one for each half of the warp's rows: shared memory's bandwidth is what the kernel has least of.
#pragma once
#include "common.cuh"

template <int ROWS> using State = float[ROWS / 16][16][4];      // [16 rows of V][8 columns of K]; [.][.][0..1] row l/4, [.][.][2..3] row l/4 + 8

// Where element [m][t][c] lies in a [128, 128] matrix, V first: the lane's first element, and how far the others are from it.
template <int ROWS> DEV int state_first(int warp, int lane) { return (warp * ROWS + lane / 4) * HEAD + 2 * (lane % 4); }
DEV constexpr int state_step(int m, int t, int c) { return (m * 16 + (c >> 1) * 8) * HEAD + t * 8 + (c & 1); }

template <int ROWS> DEV void state_zero(State<ROWS> &S) {
    #pragma unroll
    for (int i = 0; i < ROWS * 4; ++i) (&S[0][0][0])[i] = 0.f;
}
template <int ROWS> DEV void state_identity(State<ROWS> &S, int warp, int lane) {
    int first = state_first<ROWS>(warp, lane);
    #pragma unroll
    for (int m = 0; m < ROWS / 16; ++m)
        #pragma unroll
        for (int t = 0; t < 16; ++t)
            #pragma unroll
            for (int c = 0; c < 4; ++c) {
                int at = first + state_step(m, t, c);
                S[m][t][c] = at / HEAD == at % HEAD ? 1.f : 0.f;
            }
}
template <int ROWS> DEV void state_load(State<ROWS> &S, const float *from, int warp, int lane) {
    from += state_first<ROWS>(warp, lane);
    #pragma unroll
    for (int m = 0; m < ROWS / 16; ++m)
        #pragma unroll
        for (int t = 0; t < 16; ++t)
            #pragma unroll
            for (int c = 0; c < 4; ++c) S[m][t][c] = ldg_f(from + state_step(m, t, c));
}
template <int ROWS> DEV void state_store(const State<ROWS> &S, void *to, bool is_bf16, int warp, int lane) {
    int first = state_first<ROWS>(warp, lane);
    u16 *to16 = (u16 *)to + first;
    float *to32 = (float *)to + first;
    #pragma unroll
    for (int m = 0; m < ROWS / 16; ++m)
        #pragma unroll
        for (int t = 0; t < 16; ++t)
            #pragma unroll
            for (int c = 0; c < 4; c += 2) {
                if (is_bf16) *(u32 *)(to16 + state_step(m, t, c)) = pack(S[m][t][c], S[m][t][c + 1]);
                else *(float2 *)(to32 + state_step(m, t, c)) = make_float2(S[m][t][c], S[m][t][c + 1]);
            }
}

// The matrix transposed, [K, K] as the stitch reads it: for each store a warp fills four 32-byte sectors.
template <int ROWS> DEV void state_store_transposed(const State<ROWS> &S, float *to, int warp, int lane) {
    to += 2 * (lane % 4) * HEAD + warp * ROWS + lane / 4;
    #pragma unroll
    for (int m = 0; m < ROWS / 16; ++m)
        #pragma unroll
        for (int t = 0; t < 16; ++t)
            #pragma unroll
            for (int c = 0; c < 4; ++c) to[(t * 8 + (c & 1)) * HEAD + m * 16 + (c >> 1) * 8] = S[m][t][c];
}

// ROWS: of the state, per warp. 32 fill the block's 128 rows; with 16 the block has half of them (V is split over two).
template <bool OUT, int ROWS> struct Chain {
    const Params &p;
    u32 smem;
    int warp, lane, head, slot = 0;                             // `slot`: the stage of the next tile, `turn`: its round's parity
    u32 turn = 0;
    u32 right, left, small, v_lane, out_lane;                   // this lane's addresses within a stage
    const char *out_to;                                         // this lane's 16 bytes of token 0
    State<ROWS> S;

    DEV Chain(const Params &p_, u32 smem_, int warp_, int lane_, int head_) : p(p_), smem(smem_), warp(warp_), lane(lane_), head(head_) {
        right = once(ChunksFirst(lane).base);
        left = once(RowsFirst(lane).base);
        small = once(small_chunks_first(lane));
        v_lane = once(chunk_at(lane & 15, ROWS / 8 * warp + (lane >> 4)));      // rows of V 0-15; ^ 32 for rows 16-31
        if (OUT) {
            int chunk = ROWS / 8 * warp + lane % LANES;
            out_lane = once(chunk_at(lane / LANES, chunk));
            out_to = once((const char *)p.out + head * (HEAD * 2) + chunk * 16);
        }
    }

    DEV void step(u32 stage, bool with_v) {
        LaneTile right_tile{right}, left_tile{left};
        float w[ROWS / 16][2][4], o[ROWS / 16][2][4];                    // [rows of V][tokens]
        #pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) (&w[0][0][0])[i] = (&o[0][0][0])[i] = 0.f;
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            u32 k[4], q[4];
            ldsm(k, right_tile.at(stage, kk) + K_AT);
            if (OUT) ldsm(q, right_tile.at(stage, kk) + Q_AT);
            #pragma unroll
            for (int m = 0; m < ROWS / 16; ++m) {
                const float (&x)[4] = S[m][2 * kk], (&y)[4] = S[m][2 * kk + 1];
                u32 s[4] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3])};
                mma(w[m][0], s, k[0], k[1]); mma(w[m][1], s, k[2], k[3]);
                if (OUT) { mma(o[m][0], s, q[0], q[1]); mma(o[m][1], s, q[2], q[3]); }
            }
        }
        u32 M[4], u[ROWS / 16][4];
        ldsm(M, stage + small + M_AT);
        #pragma unroll
        for (int m = 0; m < ROWS / 16; ++m) {
            u32 v[4] = {0, 0, 0, 0}, r[4];
            if (with_v) ldsm_t(v, stage + (v_lane ^ (m * 32)) + V_AT);  // v[0], v[2]: tokens 0-7, rows 0-7 and 8-15; v[1], v[3]: tokens 8-15
            #pragma unroll
            for (int t = 0; t < 2; ++t)
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float x = w[m][t][2 * h], y = w[m][t][2 * h + 1];
                    r[2 * t + h] = pack(bf16_lo(v[t + 2 * h]) - x, bf16_hi(v[t + 2 * h]) - y);
                }
            float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
            mma(c[0], r, M[0], M[1]); mma(c[1], r, M[2], M[3]);
            #pragma unroll
            for (int t = 0; t < 2; ++t) { u[m][2 * t] = pack(c[t][0], c[t][1]); u[m][2 * t + 1] = pack(c[t][2], c[t][3]); }
        }
        u32 decay = stage + DECAY_AT + (lane % 4) * 8;
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            u32 k[4]; ldsm_t(k, left_tile.at(stage, kk) + G_AT);
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 d = lds_f2(decay + (2 * kk + h) * 32);
                #pragma unroll
                for (int m = 0; m < ROWS / 16; ++m) {
                    float (&x)[4] = S[m][2 * kk + h];
                    x[0] *= d.x; x[1] *= d.y; x[2] *= d.x; x[3] *= d.y;
                    mma(x, u[m], k[2 * h], k[2 * h + 1]);
                }
            }
        }
        if (OUT) {                                              // the output takes the place of this warp's part of v
            ldsm(M, stage + small + P_AT);
            #pragma unroll
            for (int m = 0; m < ROWS / 16; ++m) {
                float (&x)[4] = o[m][0], (&y)[4] = o[m][1];
                mma(x, u[m], M[0], M[1]); mma(y, u[m], M[2], M[3]);
                stsm_t(stage + (v_lane ^ (m * 32)) + V_AT, pack(x[0], x[1]), pack(y[0], y[1]), pack(x[2], x[3]), pack(y[2], y[3]));
            }
        }
    }

    DEV float norm2() const {                                   // sum of squares of this warp's rows
        float sum = 0.f;
        #pragma unroll
        for (int i = 0; i < ROWS * 4; ++i) sum += (&S[0][0][0])[i] * (&S[0][0][0])[i];
        #pragma unroll
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        return sum;
    }

    // The tile's output, from where `step` left it: 16 bytes a lane, LANES lanes a token, PARTS parts of the tile.
    static constexpr int LANES = ROWS / 8, PARTS = TILE * LANES / 32;
    struct OutPart { uint4 x[PARTS]; };
    DEV OutPart read_out(u32 stage) {
        __syncwarp();
        OutPart part;
        #pragma unroll
        for (int i = 0; i < PARTS; ++i) part.x[i] = lds_u4(stage + (out_lane ^ (i * 64)) + i * 8 * 256 + V_AT);
        return part;
    }
    DEV void write_out(const OutPart &part, int first, int tokens) {
        #pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            int row = i * 8 + lane / LANES;
            if (row < tokens) *(uint4 *)wide(first + row, p.out_stride, out_to) = part.x[i];
        }
    }

    DEV void write_checkpoints(int row, int offset) {
        #pragma unroll 1
        for (int c = 0; c < p.C; ++c) if (p.offsets[row * p.C + c] == offset) {
            long long at = ((long long)(row * p.C + c) * p.H + head) * HEAD * HEAD;
            state_store<ROWS>(S, (char *)p.checkpoints + at * (p.checkpoints_bf16 ? 2 : 4), p.checkpoints_bf16, warp, lane);
        }
    }

    // Walk the tiles of one phase, in the order the producers make them; not to be called for an empty one.
    DEV void run(int row, int row_begin, bool with_v) {
        for (bool last = false; !last;) {
            mbar_wait(bar_ready(smem, slot), turn);
            u32 at = smem + slot * STAGE_BYTES;
            uint4 meta = lds_u4(at + META_AT);                  // first token, tokens, last of the phase, checkpoint here
            step(at, with_v);
            OutPart part;
            if (OUT) part = read_out(at);
            warp_arrive(bar_free(smem, slot), lane);
            if (OUT) write_out(part, meta.x, meta.y);
            if (OUT && meta.w) write_checkpoints(row, meta.x + meta.y - row_begin);
            last = meta.z;
            if (++slot == STAGES) { slot = 0; turn ^= 1; }
        }
    }
};
