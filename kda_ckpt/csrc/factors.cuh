// Producers: raw tiles in, tile factors out, all in shared memory.
//
// With G the running sum of log2 decays inside the tile, per channel:
//     q e^G, k e^G, k e^(G_end - G), e^(G_end)                    every exponent <= 0
//     A = stril(k e^G (k e^-G)^T),  P = tril(q e^G (k e^-G)^T)    e^-G <= e^80, which bf16's range holds
//     M = (I + diag(beta) A)^-1 diag(beta)                        forward substitution in fp32
#pragma once
#include "common.cuh"

// The tiles of tokens [begin, end): 16 tokens each, cut short at checkpoint offsets.
struct TileWalk {
    int pos, end, row_begin, next_cut;
    bool cut_known;                                             // next_cut is a checkpoint, not just the end
    const int *cuts; int C;
    DEV TileWalk(int begin, int end_, int row_begin_, const int *cuts_, int C_)
        : pos(begin), end(end_), row_begin(row_begin_), cuts(cuts_), C(cuts_ ? C_ : 0) { find_cut(); }
    DEV void find_cut() {
        next_cut = end; cut_known = false;
        for (int c = 0; c < C; ++c) {
            int at = row_begin + cuts[c];
            if (at > pos && at <= next_cut) { next_cut = at; cut_known = true; }
        }
    }
    DEV bool done() const { return pos >= end; }
    DEV int tile_end() const { return min(pos + TILE, next_cut); }
    DEV bool ends_at_cut() const { return cut_known && tile_end() == next_cut; }
    DEV void step() { pos = tile_end(); if (pos == next_cut && pos < end) find_cut(); }
};

template <bool OUT> struct Producer {
    const Params &p;
    u32 smem;
    int group, thread, warp, lane, head;
    float gate_slope, gate_offset[2], gate_scale;      // log2 decay = gate_scale / (1 + 2^(slope g + offset))
    int made;                                          // tiles this group has made so far, in all phases
    u32 pair_base;                                     // this thread's channel pair and half of the tokens

    DEV Producer(const Params &p_, u32 smem_, int tid, int head_) : p(p_), smem(smem_), head(head_) {
        group = tid / GROUP_THREADS; thread = tid % GROUP_THREADS; warp = thread / 32; lane = thread % 32; made = 0;
        u32 pair = warp * 16 + lane % 16, half = lane / 16;
        pair_base = chunk_at(half * 8, pair >> 2) + (pair & 3) * 4;
        gate_slope = -LOG2E * ex2(LOG2E * p.A_log[head]);
        for (int c = 0; c < 2; ++c) gate_offset[c] = gate_slope * p.dt_bias[head * HEAD + 2 * pair + c];
        gate_scale = LOG2E * p.lower_bound;
    }
    DEV int stage_of(int n) const { return (2 * n + group) % STAGES; }
    DEV u32 turn_of(int n) const { return ((2 * n + group) / STAGES) & 1; }
    DEV u32 pair_at(u32 tile, int i) const { return ((tile + pair_base) ^ (i << 4)) + i * 256; }

    DEV void fetch(int n, int first, int tokens, bool last, bool cut, bool with_v) {
        int s = stage_of(n);
        u32 stage = smem + s * STAGE_BYTES;
        mbar_wait(bar_free(smem, s), turn_of(n) ^ 1);
        if (thread == 0) {
            sts32(stage + META_AT, first); sts32(stage + META_AT + 4, tokens);
            sts32(stage + META_AT + 8, last); sts32(stage + META_AT + 12, cut);
        }
        int chunk = thread & 15;
        for (int half = 0; half < 2; ++half) {
            int row = (thread >> 4) + 8 * half;
            bool valid = row < tokens;
            long long token = first + (valid ? row : 0), column = head * HEAD + chunk * 8;
            u32 to = stage + chunk_at(row, chunk);
            if (OUT) cp_async16(to + Q_AT, p.q + token * p.q_stride + column, valid);
            cp_async16(to + K_AT, p.k + token * p.k_stride + column, valid);
            cp_async16(to + G_AT, p.g + token * p.g_stride + column, valid);
            if (with_v) cp_async16(to + V_AT, p.v + token * p.v_stride + column, valid);
        }
        mbar_arrive_when_copied(bar_loaded(smem, s));
    }

    // 1 / |row| of the raw q (which = 0, times D^-1/2) or k (1): the diagonal of the tile times its transpose.
    DEV void norms(int n, int which) {
        int s = stage_of(n);
        mbar_wait(bar_loaded(smem, s), turn_of(n));
        u32 tile = smem + s * STAGE_BYTES + (which ? K_AT : Q_AT);
        LaneTile at(lane);
        float lo[4] = {0, 0, 0, 0}, hi[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            u32 a[4]; ldsm(a, at.at(tile, kk));
            mma(lo, a, a[0], a[2]); mma(hi, a, a[1], a[3]);
        }
        // Lane l holds rows l/4 (and + 8), columns 2 (l % 4) + {0, 1} of each 8-column half: the diagonal where they meet.
        u32 to = smem + NORM_AT + (((group * 2 + (n & 1)) * 2 + which) * TILE) * 4;
        int row = lane / 4, odd = row & 1;
        if (lane % 4 == row / 2) {
            float scale = which ? 1.f : 0.08838834764831845f;
            sts_f(to + row * 4, scale * rsqrt_fast((odd ? lo[1] : lo[0]) + 1e-6f));
            sts_f(to + (row + 8) * 4, scale * rsqrt_fast((odd ? hi[3] : hi[2]) + 1e-6f));
        }
    }

    // Gates to decays, and the four scaled copies of the tile. A thread owns two channels of eight tokens.
    DEV void scale(int n, u32 kf) {
        u32 stage = smem + stage_of(n) * STAGE_BYTES;
        int half = lane / 16, tokens = (int)lds32(stage + META_AT + 4);
        if (tokens < TILE)                                      // no decay after the last token: the most negative gate
            for (int i = 0; i < 8; ++i) if (half * 8 + i >= tokens) sts32(pair_at(stage, i) + G_AT, 0xff7fff7fu);
        float G[8][2], sum[2] = {0, 0};
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 g = lds32(pair_at(stage, i) + G_AT);
            sum[0] += gate_scale * rcp(1.f + ex2(gate_slope * bf16_lo(g) + gate_offset[0]));
            sum[1] += gate_scale * rcp(1.f + ex2(gate_slope * bf16_hi(g) + gate_offset[1]));
            G[i][0] = sum[0]; G[i][1] = sum[1];
        }
        float end[2];
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            float other = __shfl_xor_sync(~0u, sum[c], 16), before = half ? other : 0.f;
            #pragma unroll
            for (int i = 0; i < 8; ++i) G[i][c] += before;
            end[c] = ex2(sum[c] + other);
        }
        if (!half) sts_f2(stage + DECAY_AT + (warp * 16 + lane) * 8, end[0], end[1]);
        u32 norm = smem + NORM_AT + ((group * 2 + (n & 1)) * 2 * TILE + half * 8) * 4;
        float nq[8], nk[8];
        #pragma unroll
        for (int i = 0; i < 8; i += 4) {
            float4 x = lds_f4(norm + TILE * 4 + i * 4); nk[i] = x.x; nk[i + 1] = x.y; nk[i + 2] = x.z; nk[i + 3] = x.w;
            if (OUT) { float4 y = lds_f4(norm + i * 4); nq[i] = y.x; nq[i + 1] = y.y; nq[i + 2] = y.z; nq[i + 3] = y.w; }
        }
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 at = pair_at(stage, i), k = lds32(at + K_AT);
            float up[2] = {ex2(G[i][0]), ex2(G[i][1])};
            float k0 = bf16_lo(k) * nk[i], k1 = bf16_hi(k) * nk[i];
            float f0 = k0 * ex2(-G[i][0]), f1 = k1 * ex2(-G[i][1]);
            sts32(at + K_AT, pack(k0 * up[0], k1 * up[1]));
            sts32(at + G_AT, pack(f0 * end[0], f1 * end[1]));
            sts32(pair_at(kf, i), pack(f0, f1));
            if (OUT) {
                u32 q = lds32(at + Q_AT);
                sts32(at + Q_AT, pack(bf16_lo(q) * nq[i] * up[0], bf16_hi(q) * nq[i] * up[1]));
            }
        }
    }

    // left[16 x 128] right[16 x 128]^T in two 16 x 8 halves; even and odd steps summed apart to halve the latency.
    DEV void gram(float (&c)[2][4], u32 left, u32 right) {
        LaneTile at(lane);
        float d[2][4];
        #pragma unroll
        for (int i = 0; i < 8; ++i) (&c[0][0])[i] = (&d[0][0])[i] = 0.f;
        #pragma unroll
        for (int kk = 0; kk < 8; kk += 2) {
            u32 a[4], b[4];
            ldsm(a, at.at(left, kk)); ldsm(b, at.at(right, kk));
            mma(c[0], a, b[0], b[2]); mma(c[1], a, b[1], b[3]);
            ldsm(a, at.at(left, kk + 1)); ldsm(b, at.at(right, kk + 1));
            mma(d[0], a, b[0], b[2]); mma(d[1], a, b[1], b[3]);
        }
        #pragma unroll
        for (int i = 0; i < 8; ++i) (&c[0][0])[i] += (&d[0][0])[i];
    }

    // M[i][j], written bf16. Lane j (and j + 16, idle) solves (I + X) x = e_j with X = stril(beta A), then scales by beta_j.
    DEV void invert(float (&A)[2][4], float beta, u32 to) {
        u32 x_at = smem + X_AT + group * TILE * X_ROW;
        int row = lane / 4, col = 2 * (lane % 4);
        float beta_lo = __shfl_sync(~0u, beta, row), beta_hi = __shfl_sync(~0u, beta, row + 8);
        #pragma unroll
        for (int t = 0; t < 2; ++t)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {                       // transposed: [j][i]
                u32 at = x_at + (t * 8 + col + c) * X_ROW;
                sts_f(at + row * 4, beta_lo * A[t][c]);
                sts_f(at + (row + 8) * 4, beta_hi * A[t][2 + c]);
            }
        __syncwarp();
        float x[TILE];
        #pragma unroll
        for (int i = 0; i < TILE; ++i) x[i] = (lane & 15) == i ? 1.f : 0.f;
        #pragma unroll
        for (int j = 0; j < TILE - 1; ++j)
            #pragma unroll
            for (int i4 = (j + 1) / 4; i4 < 4; ++i4) {
                float4 c = lds_f4(x_at + j * X_ROW + i4 * 16);
                float cs[4] = {c.x, c.y, c.z, c.w};
                #pragma unroll
                for (int i = 0; i < 4; ++i) if (i4 * 4 + i > j) x[i4 * 4 + i] -= cs[i] * x[j];
            }
        if (lane < TILE)
            #pragma unroll
            for (int i = 0; i < TILE; ++i) sts16(to + i * SMALL_ROW + lane * 2, (u16)pack(x[i] * beta, 0.f));
        __syncwarp();
    }

    DEV void lower_triangle(float (&P)[2][4], u32 to) {         // P[i][j], j <= i, written bf16
        int row = lane / 4, col = 2 * (lane % 4);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (col + c > row) P[0][c] = 0.f;
            P[1][c] = 0.f;                                      // columns 8.. of rows 0..7
            if (col + c > row) P[1][2 + c] = 0.f;
        }
        stsm(to + lane_small(lane), pack(P[0][0], P[0][1]), pack(P[0][2], P[0][3]), pack(P[1][0], P[1][1]), pack(P[1][2], P[1][3]));
        __syncwarp();
    }

    DEV float raw_beta(int first, int tokens) {
        float b = 0.f;
        if (lane < tokens) {
            long long at = (long long)(first + lane) * p.beta_stride + head;
            b = p.beta_f32 ? ((const float *)p.beta)[at] : __uint_as_float((u32)((const u16 *)p.beta)[at] << 16);
        }
        return b;
    }

    // Make this group's tiles of [begin, end). `tiles_before` counts the tiles of earlier phases, both groups'.
    DEV int run(int begin, int end, int row_begin, const int *cuts, bool with_v, int tiles_before) {
        TileWalk ahead(begin, end, row_begin, cuts, p.C);
        int total = 0, mine = made, fetched = made;             // `total`: tiles of this phase walked by `ahead`
        auto fetch_next = [&]() {
            while (!ahead.done()) {
                int first = ahead.pos, e = ahead.tile_end();
                bool cut = ahead.ends_at_cut();
                bool is_mine = ((tiles_before + total) & 1) == group;
                ++total;
                ahead.step();
                if (is_mine) { fetch(fetched++, first, e - first, e >= end, cut, with_v); return; }
            }
        };
        for (int i = 0; i < LOAD_AHEAD; ++i) fetch_next();
        bar_sync(1 + group, GROUP_THREADS);                     // meta of the first tiles is visible to the group
        if (warp >= 2 && (OUT || warp == 2))
            for (int n = mine; n < mine + 2 && n < fetched; ++n) norms(n, warp == 2);
        bar_sync(1 + group, GROUP_THREADS);
        float beta = 0.f;
        if (warp == 0 && mine < fetched) beta = meta_beta(mine);
        while (mine < fetched) {
            int n = mine++;
            fetch_next();
            u32 stage = smem + stage_of(n) * STAGE_BYTES, kf = smem + KF_AT + (group * 2 + (n & 1)) * TILE_BYTES;
            mbar_wait(bar_loaded(smem, stage_of(n)), turn_of(n));
            scale(n, kf);
            bar_sync(1 + group, GROUP_THREADS);
            if (warp == 0) {
                float b = meta_tokens(n) > lane ? sigmoid(beta) : 0.f;
                if (mine < fetched) beta = meta_beta(mine);
                float A[2][4];
                gram(A, stage + K_AT, kf);
                invert(A, b, stage + M_AT);
                if (lane == 0) mbar_arrive(bar_ready(smem, stage_of(n)));
            } else if (warp == 1) {
                if (OUT) { float P[2][4]; gram(P, stage + Q_AT, kf); lower_triangle(P, stage + P_AT); }
                if (lane == 0) mbar_arrive(bar_ready(smem, stage_of(n)));
            } else if (OUT || warp == 2) {
                if (n + 2 < fetched) norms(n + 2, warp == 2);
            }
        }
        made = mine;
        return total;
    }
    DEV int meta_tokens(int n) const { return (int)lds32(smem + stage_of(n) * STAGE_BYTES + META_AT + 4); }
    DEV float meta_beta(int n) { return raw_beta((int)lds32(smem + stage_of(n) * STAGE_BYTES + META_AT), meta_tokens(n)); }
};
