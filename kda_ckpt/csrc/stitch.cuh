// The stitch: S_in[j + 1] = S_in[j] T_j + L_j over the segments of a row, in place over L, in tf32 with fp32 sums.
// One block for 16 rows of V of one (row, head); each of its eight warps owns 16 columns of K.
#pragma once
#include "common.cuh"

constexpr int STITCH_ROW = HEAD + 4;

DEV int segments_of(const Params &p, int row) { return max(1, (p.cu[row + 1] - p.cu[row] + p.segment_len - 1) / p.segment_len); }

// Segments of all rows are numbered through: unit u is segment `segment` of row `row`. False when there is no such unit.
DEV bool find_unit(const Params &p, int unit, int &row, int &segment) {
    #pragma unroll 1
    for (row = 0, segment = unit; row < p.N; ++row) {
        int count = segments_of(p, row);
        if (segment < count) return true;
        segment -= count;
    }
    return false;
}

DEV void load_transfer(u32 (&t)[16][2][2], const float *T, int column, int lane) {     // B fragments, k8 x n8
    #pragma unroll
    for (int kk = 0; kk < 16; ++kk)
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int h = 0; h < 2; ++h) t[kk][n][h] = tf32(T[(kk * 8 + h * 4 + lane % 4) * HEAD + column + n * 8 + lane / 4]);
}

DEV void stitch_rows(const Params &p, float (*S)[STITCH_ROW], int row, int head, int v_row) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = warp * 16;
    int used = segments_of(p, row), first = 0;
    #pragma unroll 1
    for (int n = 0; n < row; ++n) first += segments_of(p, n);
    long long at = (long long)first * p.H + head, matrix = (long long)p.H * HEAD * HEAD;
    float *L = p.local + at * HEAD * HEAD + v_row * HEAD;
    const float *T = p.transfer + at * HEAD * HEAD;
    if (used < 3) return;                                       // the first segment's end state is exact as it is
    int c_row = lane / 4, c_col = column + 2 * (lane % 4);
    for (int i = threadIdx.x; i < 16 * HEAD; i += blockDim.x) S[i / HEAD][i % HEAD] = L[i];
    for (int j = 1; j + 1 < used; ++j) {
        float *Lj = L + j * matrix;
        bool fresh = p.forgotten[at + (long long)j * p.H];
        float c[2][4];
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 x = *(const float2 *)(Lj + (c_row + 8 * h) * HEAD + c_col + n * 8);
                c[n][2 * h] = x.x; c[n][2 * h + 1] = x.y;
            }
        u32 t[16][2][2];
        if (!fresh) load_transfer(t, T + j * matrix, column, lane);
        __syncthreads();                                        // S is complete
        if (!fresh)
            #pragma unroll
            for (int kk = 0; kk < 16; ++kk) {
                int k = kk * 8 + lane % 4;
                u32 a[4] = {tf32(S[c_row][k]), tf32(S[c_row + 8][k]), tf32(S[c_row][k + 4]), tf32(S[c_row + 8][k + 4])};
                mma_tf32(c[0], a, t[kk][0][0], t[kk][0][1]);
                mma_tf32(c[1], a, t[kk][1][0], t[kk][1][1]);
            }
        __syncthreads();                                        // S is read
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 x = make_float2(c[n][2 * h], c[n][2 * h + 1]);
                *(float2 *)&S[c_row + 8 * h][c_col + n * 8] = x;
                if (!fresh) *(float2 *)(Lj + (c_row + 8 * h) * HEAD + c_col + n * 8) = x;
            }
    }
}
