// The chain: eight warps walk the tiles in order, each with its own 16 rows of the state in registers (fp32), never
// talking to another. For one tile, transposed so that V rows are the matrix rows and no operand is ever moved:
//     W = S K~^T        R = V^T - W        U = R M^T        O = S Q~^T + U P^T        S = S diag(e^G_end) + U K^
// (K~ = k e^G, Q~ = q e^G, K^ = k e^(G_end - G)). The accumulator layout of one product, rounded to bf16, is the
// left operand layout of the next: S, R and U go from sums to operands in place.
#pragma once
#include "common.cuh"

typedef float State[16][4];            // 16 n-tiles of 8 columns of K; [.][0..1] row l/4, [.][2..3] row l/4 + 8

DEV void state_zero(State &S) {
    #pragma unroll
    for (int t = 0; t < 16; ++t) { S[t][0] = S[t][1] = S[t][2] = S[t][3] = 0.f; }
}
DEV void state_identity(State &S, int warp, int lane) {
    int row = warp * 16 + lane / 4, col = 2 * (lane % 4);
    #pragma unroll
    for (int t = 0; t < 16; ++t)
        #pragma unroll
        for (int c = 0; c < 4; ++c) S[t][c] = row + 8 * (c >> 1) == t * 8 + col + (c & 1) ? 1.f : 0.f;
}
DEV void state_load(State &S, const float *from, int warp, int lane) {                  // from: [128, 128] V first
    int at = (warp * 16 + lane / 4) * HEAD + 2 * (lane % 4);
    #pragma unroll
    for (int t = 0; t < 16; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            int i = at + h * 8 * HEAD + t * 8;
            S[t][2 * h] = ldg_f(from + i); S[t][2 * h + 1] = ldg_f(from + i + 1);
        }
}
DEV void state_store(const State &S, void *to, bool is_bf16, int warp, int lane) {
    int at = (warp * 16 + lane / 4) * HEAD + 2 * (lane % 4);
    #pragma unroll
    for (int t = 0; t < 16; ++t)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            int i = at + h * 8 * HEAD + t * 8;
            if (is_bf16) *(u32 *)((u16 *)to + i) = pack(S[t][2 * h], S[t][2 * h + 1]);
            else *(float2 *)((float *)to + i) = make_float2(S[t][2 * h], S[t][2 * h + 1]);
        }
}

template <bool OUT> struct Chain {
    const Params &p;
    u32 smem;
    int warp, lane, head, tile;                                 // `tile` counts all tiles seen, in all phases
    State S;

    DEV Chain(const Params &p_, u32 smem_, int warp_, int lane_, int head_) : p(p_), smem(smem_), warp(warp_), lane(lane_), head(head_), tile(0) {}

    DEV void step(u32 stage, bool with_v) {
        ChunksFirst right(lane);
        RowsFirst left(lane);
        float w[2][2][4], o[2][4];
        #pragma unroll
        for (int i = 0; i < 16; ++i) (&w[0][0][0])[i] = 0.f;
        #pragma unroll
        for (int i = 0; i < 8; ++i) (&o[0][0])[i] = 0.f;
        u32 s[8][4];
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            s[kk][0] = pack(S[2 * kk][0], S[2 * kk][1]); s[kk][1] = pack(S[2 * kk][2], S[2 * kk][3]);
            s[kk][2] = pack(S[2 * kk + 1][0], S[2 * kk + 1][1]); s[kk][3] = pack(S[2 * kk + 1][2], S[2 * kk + 1][3]);
            u32 b[4]; ldsm(b, right.at(stage, kk) + K_AT);
            mma(w[kk & 1][0], s[kk], b[0], b[1]); mma(w[kk & 1][1], s[kk], b[2], b[3]);
        }
        if (OUT)
            #pragma unroll
            for (int kk = 0; kk < 8; ++kk) {
                u32 b[4]; ldsm(b, right.at(stage, kk) + Q_AT);
                mma(o[0], s[kk], b[0], b[1]); mma(o[1], s[kk], b[2], b[3]);
            }
        u32 decay = stage + DECAY_AT + (lane % 4) * 8;
        #pragma unroll
        for (int t = 0; t < 16; ++t) {
            float2 d = lds_f2(decay + t * 32);
            S[t][0] *= d.x; S[t][1] *= d.y; S[t][2] *= d.x; S[t][3] *= d.y;
        }
        u32 v_at = stage + V_AT + chunk_at(lane & 15, 2 * warp + (lane >> 4));
        u32 v[4] = {0, 0, 0, 0}, r[4], u[4], m[4];
        if (with_v) ldsm_t(v, v_at);                            // v[0], v[2]: tokens 0-7, rows 0-7 and 8-15; v[1], v[3]: tokens 8-15
        #pragma unroll
        for (int t = 0; t < 2; ++t)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 x = v[t + 2 * h];
                r[2 * t + h] = pack(bf16_lo(x) - (w[0][t][2 * h] + w[1][t][2 * h]), bf16_hi(x) - (w[0][t][2 * h + 1] + w[1][t][2 * h + 1]));
            }
        u32 small = stage + small_chunks_first(lane);
        ldsm(m, small + M_AT);
        float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        mma(c[0], r, m[0], m[1]); mma(c[1], r, m[2], m[3]);
        #pragma unroll
        for (int t = 0; t < 2; ++t) { u[2 * t] = pack(c[t][0], c[t][1]); u[2 * t + 1] = pack(c[t][2], c[t][3]); }
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            u32 b[4]; ldsm_t(b, left.at(stage, kk) + G_AT);
            mma(S[2 * kk], u, b[0], b[1]); mma(S[2 * kk + 1], u, b[2], b[3]);
        }
        if (OUT) {                                              // the output takes the place of this warp's part of v
            ldsm(m, small + P_AT);
            mma(o[0], u, m[0], m[1]); mma(o[1], u, m[2], m[3]);
            stsm_t(v_at, pack(o[0][0], o[0][1]), pack(o[1][0], o[1][1]), pack(o[0][2], o[0][3]), pack(o[1][2], o[1][3]));
        }
    }

    DEV void write_out(u32 stage, int first, int tokens) {      // 32 bytes of each token, two lanes a token
        __syncwarp();
        int row = lane >> 1, chunk = 2 * warp + (lane & 1);
        uint4 x = lds_u4(stage + V_AT + chunk_at(row, chunk));
        if (row < tokens) *(uint4 *)((char *)p.out + (u64)(u32)(first + row) * p.out_stride + head * (HEAD * 2) + chunk * 16) = x;
    }

    DEV void write_checkpoints(int row, int offset) {
        #pragma unroll 1
        for (int c = 0; c < p.C; ++c) if (p.offsets[row * p.C + c] == offset) {
            long long at = ((long long)(row * p.C + c) * p.H + head) * HEAD * HEAD;
            state_store(S, (char *)p.checkpoints + at * (p.checkpoints_bf16 ? 2 : 4), p.checkpoints_bf16, warp, lane);
        }
    }

    // Walk the tiles of one phase, in the order the producers make them; not to be called for an empty one.
    DEV void run(int row, int row_begin, bool with_v) {
        for (bool last = false; !last; ++tile) {
            int n = tile >> 1, s = (tile & 1) * (STAGES / 2) + n % (STAGES / 2);
            u32 stage = smem + s * STAGE_BYTES;
            mbar_wait(bar_ready(smem, s), (n / (STAGES / 2)) & 1);
            uint4 meta = lds_u4(stage + META_AT);               // first token, tokens, last of the phase, checkpoint here
            step(stage, with_v);
            if (OUT) write_out(stage, meta.x, meta.y);
            __syncwarp();
            if (lane == 0) mbar_arrive(bar_free(smem, s));
            if (OUT && meta.w) write_checkpoints(row, meta.x + meta.y - row_begin);
            last = meta.z;
        }
    }
};
