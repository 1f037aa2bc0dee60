// The stitch: S_in[j + 1] = S_in[j] T_j + L_j over the segments of a row, in place over L, in tf32 with fp32 sums.
// One block for 16 rows of V of one (row, head); each of its eight warps owns 16 columns of K.
#pragma once
#include "common.cuh"

constexpr int STITCH_ROW = HEAD + 16;

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

// What one step of a thread's stitch needs from memory: fetched a step ahead, for that is what the stitch waits for.
struct StitchStep {
    float4 t[8][2];                                             // of T, transposed: four neighbours in k, for two k8 x n8 steps
    float c[2][4];                                              // L, where the sums go
    bool forgotten;
    DEV void load(const float *T, const float *L, const int *flag, int column, int lane) {
        forgotten = *flag;
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 x = *(const float2 *)(L + (lane / 4 + 8 * h) * HEAD + column + n * 8 + 2 * (lane % 4));
                c[n][2 * h] = x.x; c[n][2 * h + 1] = x.y;
            }
        if (forgotten) return;
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk)
            #pragma unroll
            for (int n = 0; n < 2; ++n) t[kk][n] = *(const float4 *)(T + (column + n * 8 + lane / 4) * HEAD + kk * 16 + 4 * (lane % 4));
    }
};

DEV void stitch_rows(const Params &p, float (*S)[STITCH_ROW], int row, int head, int v_row) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = warp * 16, c_row = lane / 4, c_col = column + 2 * (lane % 4);
    int used = segments_of(p, row), first = 0;
    #pragma unroll 1
    for (int n = 0; n < row; ++n) first += segments_of(p, n);
    if (used < 3) return;                                       // the first segment's end state is exact as it is
    long long at = (long long)first * p.H + head, matrix = (long long)p.H * HEAD * HEAD;
    float *L = p.local + at * HEAD * HEAD + v_row * HEAD;
    const float *T = p.transfer + at * HEAD * HEAD;
    const int *flag = p.forgotten + at;
    StitchStep now, next;
    now.load(T + matrix, L + matrix, flag + p.H, column, lane);
    for (int i = threadIdx.x; i < 16 * HEAD; i += blockDim.x) S[i / HEAD][i % HEAD] = L[i];
    for (int j = 1; j + 1 < used; ++j) {
        if (j + 2 < used) next.load(T + (j + 1) * matrix, L + (j + 1) * matrix, flag + (j + 1) * p.H, column, lane);
        __syncthreads();                                        // S is complete
        if (!now.forgotten)
            #pragma unroll
            for (int kk = 0; kk < 8; ++kk) {                    // 16 of k: both operands take it in the same order, four a lane
                float4 x = *(const float4 *)&S[c_row][kk * 16 + 4 * (lane % 4)], y = *(const float4 *)&S[c_row + 8][kk * 16 + 4 * (lane % 4)];
                u32 a[4] = {tf32(x.x), tf32(y.x), tf32(x.y), tf32(y.y)}, b[4] = {tf32(x.z), tf32(y.z), tf32(x.w), tf32(y.w)};
                #pragma unroll
                for (int n = 0; n < 2; ++n) {
                    mma_tf32(now.c[n], a, tf32(now.t[kk][n].x), tf32(now.t[kk][n].y));
                    mma_tf32(now.c[n], b, tf32(now.t[kk][n].z), tf32(now.t[kk][n].w));
                }
            }
        __syncthreads();                                        // S is read
        float *Lj = L + j * matrix;
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 x = make_float2(now.c[n][2 * h], now.c[n][2 * h + 1]);
                *(float2 *)&S[c_row + 8 * h][c_col + n * 8] = x;
                if (!now.forgotten) *(float2 *)(Lj + (c_row + 8 * h) * HEAD + c_col + n * 8) = x;
            }
        now = next;
    }
}
