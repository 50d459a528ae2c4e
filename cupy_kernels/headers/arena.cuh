// The small structs in device memory that kernels over the arena read. Values that change each step
// are here, because a captured graph freezes its arguments. ops/updates/spec.py mirrors them.
#pragma once
#include "device.cuh"

// One update's numbers.
struct Hyper {
  float rate;   // Adam's correction for the start is in it
  float decay;  // weight decay, to be multiplied by a group's own
  float keep, take;    // a decay rate rho and 1 - rho; for Nesterov mu and 1 + mu
  float keep2, take2;  // Adam's second pair
  float delta;
  float strength;  // lambda of DC-ASGD, alpha of elastic averaging
  float unscale;   // what a gradient is multiplied by before its norm is looked at
  float clip;      // the largest norm, or 0
  u32 l1;          // decay by sign
  u32 unused;
};

// A group's share of the rate and of the decay.
struct Multipliers {
  float rate, decay;
};

// What the guard found: the norm after unscaling, the factor to apply to each gradient value, whether
// to leave the step out because a value is not finite, and how many steps were left out so far.
struct Verdict {
  float norm, scale;
  u32 skip, skips;
};
