// Convolution the plain way: unroll the windows into a matrix, multiply, fold the gradient back.
// Slow and easy to read, to check convolution.cu by; and the product of matrices of any strides.
//
// Layout: activations NHWC, float32; a row of `columns` belongs to one output pixel and holds
// (c, kh, kw), the order of Caffe's weights, so a group's windows are a slice of it.
// Launch: `im2col` and `col2im` a grid-stride loop over elements; `strided_product` blocks of
// 16 x 16, grid (columns / 16, rows / 16).
// Rounding: sums in order of k, or of the window's places; each product and each sum once.
#include "device.cuh"

#define SIDE 16

// columns[(n, p, q), (c, i, j)] = x[n, p*sh-ph+i*dh, q*sw-pw+j*dw, c], zero outside the image.
extern "C" __global__ void __launch_bounds__(256)
    im2col(const float* x, float* columns, int n, int h, int w, int c, int kh, int kw, int sh,
           int sw, int ph, int pw, int dh, int dw, int oh, int ow) {
  i64 length = (i64)c * kh * kw;
  for (GRID_STRIDE(i, n * length * oh * ow)) {
    i64 pixel = i / length, place = i % length, image = pixel / ow / oh;
    int row = (int)(pixel / ow % oh) * sh - ph + (int)(place / kw % kh) * dh;
    int column = (int)(pixel % ow) * sw - pw + (int)(place % kw) * dw;
    bool inside = row >= 0 && row < h && column >= 0 && column < w;
    columns[i] = inside ? x[((image * h + row) * w + column) * c + place / kw / kh] : 0.0f;
  }
}

// dx = the sum of all places of `columns` that `im2col` would have filled from it.
extern "C" __global__ void __launch_bounds__(256)
    col2im(const float* columns, float* dx, int n, int h, int w, int c, int kh, int kw, int sh,
         int sw, int ph, int pw, int dh, int dw, int oh, int ow) {
  i64 length = (i64)c * kh * kw;
  for (GRID_STRIDE(at, (i64)n * h * w * c)) {
    i64 pixel = at / c, image = pixel / w / h, channel = at % c;
    int row = (int)(pixel / w % h) + ph, column = (int)(pixel % w) + pw;
    float sum = 0.0f;
    for (int i = 0; i < kh; ++i)
      for (int j = 0; j < kw; ++j) {
        int down = row - i * dh, right = column - j * dw;
        if (down < 0 || right < 0 || down % sh || right % sw) continue;
        if (down / sh >= oh || right / sw >= ow) continue;
        i64 line = (image * oh + down / sh) * ow + right / sw;
        sum += columns[line * length + (channel * kh + i) * kw + j];
      }
    dx[at] = sum;
  }
}

// y[i * y_row + j] = the sum over k of a[i * a_row + k * a_step] * b[k * b_step + j * b_column].
extern "C" __global__ void __launch_bounds__(256)
    strided_product(const float* a, const float* b, float* y, i64 rows, i64 columns, i64 depth,
             i64 a_row, i64 a_step, i64 b_step, i64 b_column, i64 y_row) {
  __shared__ float left[SIDE][SIDE + 1];
  __shared__ float right[SIDE][SIDE + 1];
  int down = threadIdx.y, across = threadIdx.x;
  i64 row = (i64)blockIdx.y * SIDE + down, column = (i64)blockIdx.x * SIDE + across;
  float sum = 0.0f;
  for (i64 k = 0; k < depth; k += SIDE) {
    bool here = row < rows && k + across < depth, there = column < columns && k + down < depth;
    left[down][across] = here ? a[row * a_row + (k + across) * a_step] : 0.0f;
    right[down][across] = there ? b[(k + down) * b_step + column * b_column] : 0.0f;
    __syncthreads();
    for (int i = 0; i < SIDE; ++i) sum += left[down][i] * right[i][across];
    __syncthreads();
  }
  if (row < rows && column < columns) y[row * y_row + column] = sum;
}
