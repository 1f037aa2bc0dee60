// Producers: raw tiles in, tile factors out, all in shared memory.
//
// With G the running sum of log2 decays inside the tile, per channel:
//     q e^G, k e^G, k e^(G_end - G), e^(G_end)                    every exponent <= 0
//     A = stril(k e^G (k e^-G)^T),  P = tril(q e^G (k e^-G)^T)    e^-G <= e^80, which bf16's range holds
//     M = (I + diag(beta) A)^-1 diag(beta)                        forward substitution in fp32
//
// Two groups of four warps take tiles in turn. All four warps scale a tile (a thread owns two channels of eight tokens);
// then one of them, tile n's being warp n % 4, makes A, P and M alone while the others go on to the next tile.
#pragma once
#include "common.cuh"

// The tiles of tokens [begin, end): 16 tokens each, cut short at checkpoint offsets. With a probe, which is not cut, those of
// [probe, end) come first.
struct TileWalk {
    int pos, end, row_begin, next_cut, again;                   // again: where to start over at the end, -1 for nowhere
    bool cut_known;                                             // next_cut is a checkpoint, not just the end
    const int *cuts; int C;
    DEV TileWalk(int begin, int end_, int probe, int row_begin_, const int *cuts_, int C_)
        : pos(probe < 0 ? begin : probe), end(end_), row_begin(row_begin_), again(probe < 0 ? -1 : begin), cuts(cuts_), C(cuts_ ? C_ : 0) { find_cut(); }
    DEV void find_cut() {
        next_cut = end; cut_known = false;
        #pragma unroll 1
        for (int c = 0; c < C; ++c) {
            int at = row_begin + cuts[c];
            if (at > pos && at <= next_cut) { next_cut = at; cut_known = true; }
        }
    }
    DEV bool done() const { return pos >= end; }
    DEV int tile_end() const { return min(pos + TILE, next_cut); }
    DEV bool ends_at_cut() const { return cut_known && tile_end() == next_cut; }
    DEV void step() {
        pos = tile_end();
        if (pos >= end && again >= 0) { pos = again; again = -1; }
        else if (pos == next_cut && pos < end) find_cut();
    }
};

template <bool OUT> struct Producer {
    const Params &p;
    u32 smem;
    int group, thread, warp, lane, head;
    float gate_slope, gate_offset[2], gate_scale;               // log2 decay = gate_scale / (1 + 2^(slope g + offset))
    u32 pair_base;                                              // this thread's channel pair and half of the tokens
    const char *q_from, *k_from, *v_from, *g_from;              // this thread's 16 bytes of token 0
    bool loads_v;                                               // the block's part of V has this thread's 16 bytes
    u32 to_lane;                                                // and where they go, for the first half of a tile

    DEV Producer(const Params &p_, u32 smem_, int tid, int head_, int v_part, int v_parts) : p(p_), smem(smem_), head(head_) {
        group = tid / GROUP_THREADS; thread = tid % GROUP_THREADS; warp = thread / 32; lane = thread % 32;
        u32 pair = warp * 16 + lane % 16, half = lane / 16;
        pair_base = chunk_at(half * 8, pair >> 2) + (pair & 3) * 4;
        gate_slope = -LOG2E * ex2(LOG2E * p.A_log[head]);
        for (int c = 0; c < 2; ++c) gate_offset[c] = gate_slope * p.dt_bias[head * HEAD + 2 * pair + c];
        gate_scale = LOG2E * p.lower_bound;
        u32 column = head * (HEAD * 2) + (thread & 15) * 16;
        q_from = (const char *)p.q + column; k_from = (const char *)p.k + column;
        v_from = (const char *)p.v + column; g_from = (const char *)p.g + column;
        loads_v = (thread & 15) / (16 / v_parts) == v_part;
        to_lane = once(chunk_at(thread >> 4, thread & 15));
        if (OUT) { q_from = once(q_from); k_from = once(k_from); v_from = once(v_from); g_from = once(g_from); }
    }
    // Beside two chains registers are few: what follows from the lane is worked out anew in each tile.
    DEV int fresh_lane() const { return OUT ? lane : (int)once((u32)lane); }
    // Tile n of this group is tile 2 n + group of the block.
    DEV int stage_of(int n) const { return 2 * (n % (STAGES / 2)) + group; }
    DEV u32 turn_of(int n) const { return (n / (STAGES / 2)) & 1; }
    DEV u32 ring_turn(int n) const { return (n / RING) & 1; }

    DEV void fetch(int n, int first, int tokens, bool last, bool cut) {
        int s = stage_of(n), row = thread >> 4;
        u32 stage = smem + s * STAGE_BYTES;
        mbar_wait(bar_free(smem, s), turn_of(n) ^ 1);
        if (thread == 0) {
            sts32(stage + META_AT, first); sts32(stage + META_AT + 4, tokens);
            sts32(stage + META_AT + 8, last); sts32(stage + META_AT + 12, cut);
            mbar_arrive(bar_loaded(smem, s));                   // releases the four words; the copies arrive below
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            bool valid = row + 8 * half < tokens;
            u32 token = first + (valid ? row + 8 * half : 0);
            u32 to = stage + (to_lane ^ (half * 64)) + half * 8 * 256;
            if (OUT) cp_async16(to + Q_AT, wide(token, p.q_stride, q_from), valid);
            cp_async16(to + K_AT, wide(token, p.k_stride, k_from), valid);
            cp_async16(to + G_AT, wide(token, p.g_stride, g_from), valid);
            if (loads_v) cp_async16(to + V_AT, wide(token, p.v_stride, v_from), valid);
        }
        mbar_arrive_when_copied(bar_loaded(smem, s));
    }

    // 1 / |row| of the raw q (which = 0, times D^-1/2) or k (1): the diagonal of the tile times its transpose.
    DEV void norms(int n, int which) {
        int lane = fresh_lane();
        u32 tile = smem + stage_of(n) * STAGE_BYTES + (which ? K_AT : Q_AT);
        RowsFirst at(lane);
        float lo[4] = {0, 0, 0, 0}, hi[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            u32 a[4]; ldsm(a, at.at(tile, kk));
            mma(lo, a, a[0], a[2]); mma(hi, a, a[1], a[3]);
        }
        // Lane l holds rows l/4 (and + 8), columns 2 (l % 4) + {0, 1} of each 8-column half: the diagonal where they meet.
        u32 to = smem + NORM_AT + ((group * RING + n % RING) * 2 + which) * TILE * 4;
        int row = lane / 4, odd = row & 1;
        if (lane % 4 == row / 2) {
            float unit = which ? 1.f : 0.08838834764831845f;
            sts_f(to + row * 4, unit * rsqrt_fast((odd ? lo[1] : lo[0]) + 1e-6f));
            sts_f(to + (row + 8) * 4, unit * rsqrt_fast((odd ? hi[3] : hi[2]) + 1e-6f));
        }
    }

    // Gates to decays, and the four scaled copies of the tile.
    DEV void scale(int n, u32 kf) {
        u32 stage = smem + stage_of(n) * STAGE_BYTES, x[8];
        int half = lane / 16, tokens = (int)lds32(stage + META_AT + 4);
        u32 at = once(stage + pair_base);                       // token i's pair: (at ^ 16 i) + 256 i
        auto pair = [&](u32 tile, int i) { return (at ^ (i << 4)) + i * 256 + tile; };
        if (tokens < TILE)                                      // no decay after the last token: the most negative gate
            for (int i = 0; i < 8; ++i) if (half * 8 + i >= tokens) sts32(pair(G_AT, i), 0xff7fff7fu);
        #pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = lds32(pair(G_AT, i));
        float G[8][2], sum[2] = {0, 0};
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            G[i][0] = gate_scale * rcp(1.f + ex2(gate_slope * bf16_lo(x[i]) + gate_offset[0]));
            G[i][1] = gate_scale * rcp(1.f + ex2(gate_slope * bf16_hi(x[i]) + gate_offset[1]));
        }
        at = once(stage + pair_base);                           // not kept: registers are few
        #pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = lds32(pair(K_AT, i));
        float end[2];
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            #pragma unroll
            for (int i = 0; i < 8; ++i) { sum[c] += G[i][c]; G[i][c] = sum[c]; }
            float other = __shfl_xor_sync(~0u, sum[c], 16), before = half ? other : 0.f;
            #pragma unroll
            for (int i = 0; i < 8; ++i) G[i][c] += before;
            end[c] = ex2(sum[c] + other);
        }
        if (!half) sts_f2(stage + DECAY_AT + (warp * 16 + lane) * 8, end[0], end[1]);
        u32 norm = smem + NORM_AT + ((group * RING + n % RING) * 2 * TILE + half * 8) * 4;
        kf -= stage;
        #pragma unroll
        for (int i4 = 0; i4 < 8; i4 += 4) {
            float4 y = lds_f4(norm + (TILE + i4) * 4);
            float nk[4] = {y.x, y.y, y.z, y.w};
            #pragma unroll
            for (int i = i4; i < i4 + 4; ++i) {
                float k0 = bf16_lo(x[i]) * nk[i - i4], k1 = bf16_hi(x[i]) * nk[i - i4];
                float f0 = k0 * ex2(-G[i][0]), f1 = k1 * ex2(-G[i][1]);
                G[i][0] = ex2(G[i][0]); G[i][1] = ex2(G[i][1]);
                sts32(pair(K_AT, i), pack(k0 * G[i][0], k1 * G[i][1]));
                sts32(pair(G_AT, i), pack(f0 * end[0], f1 * end[1]));
                sts32(pair(kf, i), pack(f0, f1));
            }
        }
        if (OUT) {
            #pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = lds32(pair(Q_AT, i));
            #pragma unroll
            for (int i4 = 0; i4 < 8; i4 += 4) {
                float4 y = lds_f4(norm + i4 * 4);
                float nq[4] = {y.x, y.y, y.z, y.w};
                #pragma unroll
                for (int i = i4; i < i4 + 4; ++i)
                    sts32(pair(Q_AT, i), pack(bf16_lo(x[i]) * nq[i - i4] * G[i][0], bf16_hi(x[i]) * nq[i - i4] * G[i][1]));
            }
        }
    }

    // A = k~ kf^T and P = q~ kf^T, each 16 x 16 in two 16 x 8 halves.
    DEV void grams(float (&A)[2][4], float (&P)[2][4], u32 stage, u32 kf) {
        int lane = fresh_lane();
        RowsFirst left(lane);
        ChunksFirst right(lane);
        #pragma unroll
        for (int i = 0; i < 8; ++i) (&A[0][0])[i] = (&P[0][0])[i] = 0.f;
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            u32 a[4], b[4];
            ldsm(b, right.at(kf, kk)); ldsm(a, left.at(stage + K_AT, kk));
            mma(A[0], a, b[0], b[1]); mma(A[1], a, b[2], b[3]);
            if (OUT) {
                ldsm(a, left.at(stage + Q_AT, kk));
                mma(P[0], a, b[0], b[1]); mma(P[1], a, b[2], b[3]);
            }
        }
    }

    // M = (I + X)^-1 diag(beta), X = stril(diag(beta) A), to bf16 rows. In 8 x 8 blocks: the two on the diagonal by forward
    // substitution, a lane to a column; below them -(I + X22)^-1 X21 (I + X11)^-1 by two tf32 products. `x`: [j][i] = X[i][j].
    DEV void invert(float (&A)[2][4], float beta, u32 x, u32 to) {
        int lane = fresh_lane(), row = lane / 4, col = 2 * (lane % 4);
        float beta_lo = __shfl_sync(~0u, beta, row), beta_hi = __shfl_sync(~0u, beta, row + 8);
        #pragma unroll
        for (int t = 0; t < 2; ++t)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                u32 at = x + (t * 8 + col + c) * X_ROW;
                if (t == 0) sts_f(at + row * 4, beta_lo * A[0][c]);
                sts_f(at + (row + 8) * 4, beta_hi * A[t][2 + c]);
            }
        __syncwarp();
        int column = lane & 7, block = lane >> 3 & 1;           // lanes 16 to 31 repeat lanes 0 to 15
        u32 diagonal = x + block * 8 * X_ROW + block * 32;
        float y[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = column == i ? 1.f : 0.f;
        #pragma unroll
        for (int j = 0; j < 7; ++j)
            #pragma unroll
            for (int i4 = (j + 1) / 4; i4 < 2; ++i4) {
                float4 c = lds_f4(diagonal + j * X_ROW + i4 * 16);
                float cs[4] = {c.x, c.y, c.z, c.w};
                #pragma unroll
                for (int i = 0; i < 4; ++i) if (i4 * 4 + i > j) y[i4 * 4 + i] -= cs[i] * y[j];
            }
        __syncwarp();                                           // X on the diagonal is read: its inverse takes its place
        float own_beta = __shfl_sync(~0u, beta, lane & 15);
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (lane < TILE) sts_f(diagonal + column * X_ROW + i * 4, y[i]);
            else sts16(to + (block * 8 + i) * SMALL_ROW + (block * 8 + column) * 2, (u16)pack(y[i] * own_beta, 0.f));
        }
        __syncwarp();
        // T^T = Y1^T X21^T, then Z^T = T^T Y2^T. The sums of the first product are the left operand of the second once its
        // contraction index is taken in the order 0 2 4 6 1 3 5 7.
        u32 a[4] = {tf32(lds_f(x + row * X_ROW + (lane % 4) * 4)), 0, tf32(lds_f(x + row * X_ROW + (lane % 4 + 4) * 4)), 0};
        u32 b0 = tf32(lds_f(x + (lane % 4) * X_ROW + (8 + row) * 4)), b1 = tf32(lds_f(x + (lane % 4 + 4) * X_ROW + (8 + row) * 4));
        float t[4] = {0, 0, 0, 0}, z[4] = {0, 0, 0, 0};
        mma_tf32(t, a, b0, b1);
        a[0] = tf32(t[0]); a[2] = tf32(t[1]);
        b0 = tf32(lds_f(x + (8 + col) * X_ROW + (8 + row) * 4)); b1 = tf32(lds_f(x + (8 + col + 1) * X_ROW + (8 + row) * 4));
        mma_tf32(z, a, b0, b1);                                 // Z[i][c]: c = lane / 4, i = 2 (lane % 4) + {0, 1}
        sts16(to + (8 + col) * SMALL_ROW + row * 2, (u16)pack(-z[0] * beta_lo, 0.f));
        sts16(to + (8 + col + 1) * SMALL_ROW + row * 2, (u16)pack(-z[1] * beta_lo, 0.f));
    }

    DEV void lower_triangle(float (&P)[2][4], u32 to) {         // P[i][j], j <= i, to bf16 rows
        int lane = fresh_lane(), row = lane / 4, col = 2 * (lane % 4);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (col + c > row) P[0][c] = 0.f;
            P[1][c] = 0.f;                                      // columns 8.. of rows 0..7
            if (col + c > row) P[1][2 + c] = 0.f;
        }
        stsm(to + small_rows_first(lane), pack(P[0][0], P[0][1]), pack(P[0][2], P[0][3]), pack(P[1][0], P[1][1]), pack(P[1][2], P[1][3]));
    }

    DEV u32 beta_bits(int first, int tokens) {                  // lane i: beta of token i as it lies in memory
        if (lane >= tokens) return 0;
        const char *at = (const char *)p.beta + (u64)(u32)(first + lane) * p.beta_stride;
        return p.beta_f32 ? ((const u32 *)at)[head] : ((const u16 *)at)[head];
    }
    DEV float beta_of(u32 bits) const { return sigmoid(__uint_as_float(p.beta_f32 ? bits : bits << 16)); }
    DEV int meta(int n, int word) const { return (int)lds32(smem + stage_of(n) * STAGE_BYTES + META_AT + word * 4); }

    DEV void make_norms(int n) {
        mbar_wait(bar_loaded(smem, stage_of(n)), turn_of(n));
        if (n >= RING) mbar_wait(bar_scaled(smem, group, n), ring_turn(n - RING));      // their place is free
        norms(n, 1);
        if (OUT) norms(n, 0);
        warp_arrive(bar_normed(smem, group, n), lane);
    }

    // Make this group's tiles of [begin, end), and before them of [probe, end) unless probe is negative. What the probe found is
    // not waited for until the tiles after it would need a stage that only the chain can free: `stop()` then says whether to end.
    template <typename Stop> DEV void run(int begin, int end, int probe, int row_begin, const int *cuts, Stop stop) {
        TileWalk walk(begin, end, probe, row_begin, cuts, p.C);
        int fetched = 0;
        auto skip = [&]() { if (!walk.done()) walk.step(); };
        auto fetch_next = [&]() {
            if (walk.done()) return;
            int first = walk.pos, e = walk.tile_end();
            fetch(fetched++, first, e - first, e >= end, walk.ends_at_cut());
            walk.step();
            skip();
        };
        if (group == 1) skip();
        #pragma unroll 1
        for (int i = 0; i < LOAD_AHEAD; ++i) fetch_next();
        #pragma unroll 1
        for (int n = 0; n < 2 && n < fetched; ++n) if (warp == n % 4) make_norms(n);
        #pragma unroll 1
        for (int n = 0; n < fetched; ++n) {
            if (!OUT && n == STAGES / 2 - LOAD_AHEAD && stop()) break;
            int s = stage_of(n);
            u32 stage = smem + s * STAGE_BYTES, kf = smem + KF_AT + (group * RING + n % RING) * TILE_BYTES, bits = 0;
            fetch_next();
            mbar_wait(bar_loaded(smem, s), turn_of(n));
            if (warp == n % 4) bits = beta_bits(meta(n, 0), meta(n, 1));
            mbar_wait(bar_normed(smem, group, n), ring_turn(n));
            if (n >= RING) mbar_wait(bar_ready(smem, stage_of(n - RING)), turn_of(n - RING));   // kf is free
            scale(n, kf);
            warp_arrive(bar_scaled(smem, group, n), lane);
            if (warp == n % 4) {
                float A[2][4], P[2][4], beta = lane < meta(n, 1) ? beta_of(bits) : 0.f;
                mbar_wait(bar_scaled(smem, group, n), ring_turn(n));
                grams(A, P, stage, kf);
                if (OUT) lower_triangle(P, stage + P_AT);
                invert(A, beta, smem + X_AT + (group * 4 + warp) * X_BYTES, stage + M_AT);
                warp_arrive(bar_ready(smem, s), lane);
            } else if (warp == (n + 2) % 4 && n + 2 < fetched) make_norms(n + 2);
        }
        if (!OUT) asm volatile("cp.async.wait_all;" ::: "memory");      // tiles fetched for nothing are still on their way
    }
};
