// GATE 1: silu, 2: gelu with tanh.
template <int GATE> FUNCTION float gate_with(float x, float up) {
  if (GATE == 2)
    return 0.5f * x * (1.0f + tanh_of(0.7978845608028654f * (x + 0.044715f * x * x * x))) * up;
  return divide(x, 1.0f + exp_of(-x)) * up;
}
