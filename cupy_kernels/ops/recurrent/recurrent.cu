// One step in time of LSTM and RNN layers, between the matrix products of the steps.
//
// Layout: float32 matrices (batch, outputs), row-major. Gates are (batch, 4 * outputs): a row has its
// input gates, then forget gates, output gates and candidates (Hochreiter and Schmidhuber 1997); an
// RNN has one gate. `inputs` is the input's part of the gates, with the bias; `products` the
// previous hidden units times their matrix, or null in a first step without a state. `cont` (batch)
// is 0 where a sequence begins, so that nothing before it counts, and 1 elsewhere.
//   c = f * cont * c_before + i * g, h = o * tanh(c);  RNN: h = tanh(inputs + cont * products)
// A step writes its hidden units twice: into `hidden`, which is one step of a whole sequence, and
// into `state`, which is aligned for the next product. `counted` is cont * h_before, the factor of
// the matrix's gradient. `state` may be `before`, `dcells` is changed in place.
// Launch: one-dimensional, a grid-stride loop, one hidden unit a thread and turn.
// Rounding: each operation once; transcendental functions as CUDA's (at most 2 ulp).
#include "activation.cuh"

// The gates are activated in place: the backward pass reads them.
extern "C" __global__ void lstm_forward(float* gates, const float* products, const float* cont,
                                        const float* before, const float* cells_before,
                                        float* cells, float* hidden, float* counted, float* state,
                                        i64 batch, i64 outputs) {
  for (GRID_STRIDE(i, batch * outputs)) {
    i64 row = i / outputs, first = row * 4 * outputs + i % outputs;
    float active[4], keep = cont[row];
    for (int gate = 0; gate < 4; ++gate) {
      i64 at = first + gate * outputs;
      float v = products ? gates[at] + keep * products[at] : gates[at];
      gates[at] = active[gate] = gate == 3 ? tanhf(v) : logistic(v);
    }
    float c = active[0] * active[3];
    if (cells_before) c += active[1] * keep * cells_before[i];
    float h = active[2] * tanhf(c);
    counted[i] = before ? keep * before[i] : 0.0f;
    cells[i] = c, hidden[i] = h, state[i] = h;
  }
}

// `dhidden` is the gradient by the top, and `dproducts` that by the next step's product, or null in
// the last step. dgates_counted = cont * dgates is a factor of this step's own product.
extern "C" __global__ void lstm_backward(const float* dhidden, const float* dproducts,
                                         float* dcells, const float* gates, const float* cells,
                                         const float* cells_before, const float* cont,
                                         float* dgates, float* dgates_counted, i64 batch,
                                         i64 outputs) {
  for (GRID_STRIDE(k, batch * outputs)) {
    i64 row = k / outputs, first = row * 4 * outputs + k % outputs;
    float i = gates[first], f = gates[first + outputs], o = gates[first + 2 * outputs];
    float g = gates[first + 3 * outputs], keep = cont[row], squashed = tanhf(cells[k]);
    float dh = dproducts ? dhidden[k] + dproducts[k] : dhidden[k];
    float dc = dcells[k] + dh * o * (1.0f - squashed * squashed);
    float past = cells_before ? keep * cells_before[k] : 0.0f;
    float d[4] = {dc * g * i * (1.0f - i), dc * past * f * (1.0f - f),
                  dh * squashed * o * (1.0f - o), dc * i * (1.0f - g * g)};
    for (int gate = 0; gate < 4; ++gate) {
      i64 at = first + gate * outputs;
      dgates[at] = d[gate];
      dgates_counted[at] = keep * d[gate];
    }
    dcells[k] = dc * f * keep;
  }
}

extern "C" __global__ void rnn_forward(const float* inputs, const float* products,
                                       const float* cont, const float* before, float* hidden,
                                       float* counted, float* state, i64 batch, i64 outputs) {
  for (GRID_STRIDE(i, batch * outputs)) {
    float keep = cont[i / outputs];
    float h = tanhf(products ? inputs[i] + keep * products[i] : inputs[i]);
    counted[i] = before ? keep * before[i] : 0.0f;
    hidden[i] = h, state[i] = h;
  }
}

extern "C" __global__ void rnn_backward(const float* dhidden, const float* dproducts,
                                        const float* hidden, const float* cont, float* dgates,
                                        float* dgates_counted, i64 batch, i64 outputs) {
  for (GRID_STRIDE(i, batch * outputs)) {
    float dh = dproducts ? dhidden[i] + dproducts[i] : dhidden[i];
    float d = dh * (1.0f - hidden[i] * hidden[i]);
    dgates[i] = d;
    dgates_counted[i] = cont[i / outputs] * d;
  }
}
