// Activations by code, in the order of csrc/tables/activations.def: 1 silu, 2 gelu with tanh, 3 gelu with erf, 4 relu
// squared, 5 clamped swiglu, 6 xielu, which has numbers of its own, 7 relu, 8 limited swiglu, whose number is the limit,
// 9 clamp, which has one. What is not a number stays so.

// The share of the normal distribution above |x|: t / 2 * e**(-x**2 / 2 + p(t)), t = 2 / (2 + |x| / sqrt(2)), within
// 2e-9 but for rounding.
FUNCTION float normal_tail(float x) {
  const float t = quotient_of(2.0f, 2.0f + 0.70710678f * (x < 0.0f ? -x : x));
  float p = 0.1447765411264285f;
  p = p * t - 0.8818411326890692f;
  p = p * t + 2.158808996025885f;
  p = p * t - 2.5706105994028463f;
  p = p * t + 1.3980269546703037f;
  p = p * t - 0.4664167958981018f;
  p = p * t + 0.4967475320950496f;
  p = p * t + 0.9852803432782329f;
  p = p * t - 1.2647718408641582f;
  return 0.5f * t * exp_of(p - 0.5f * x * x);
}

// alpha_p x**2 + beta x where x is above 0, else alpha_n (e**min(x, eps) - 1 - x) + beta x; near 0 by the series of e**x.
FUNCTION float xielu(float x, float alpha_n, float alpha_p, float beta, float eps) {
  if (x > 0.0f)
    return x * x * alpha_p + beta * x;
  const float bounded = x > eps ? eps : x;
  float p = 1.0f / 40320.0f;
  p = p * bounded + 1.0f / 5040.0f;
  p = p * bounded + 1.0f / 720.0f;
  p = p * bounded + 1.0f / 120.0f;
  p = p * bounded + 1.0f / 24.0f;
  p = p * bounded + 1.0f / 6.0f;
  p = p * bounded + 0.5f;
  const float curve = bounded < -0.5f ? exp_of(bounded) - 1.0f - bounded : p * bounded * bounded;
  return (curve + (bounded - x)) * alpha_n + beta * x;
}

template <int KIND>
FUNCTION float activate_with(float x, float a = 0.0f, float b = 0.0f, float c = 0.0f, float d = 0.0f) {
  if (KIND == 6)
    return xielu(x, a, b, c, d);
  if (KIND == 2)
    return 0.5f * x * (1.0f + tanh_of(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  if (KIND == 3) {
    const float tail = normal_tail(x);
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
  if (KIND == 4)
    return x < 0.0f ? 0.0f : x * x;
  if (KIND == 9)
    return x > a ? a : x < -a ? -a : x;
  if (KIND == 7)
    return x < 0.0f ? 0.0f : x;
  if (KIND == 5) {
    const float bounded = x > 7.0f ? 7.0f : x;
    return quotient_of(bounded, 1.0f + exp_of(-1.702f * bounded));
  }
  const float bounded = KIND == 8 && x > a ? a : x;
  return quotient_of(bounded, 1.0f + exp_of(-bounded));
}

template <int KIND>
FUNCTION float gate_with(float x, float up, float a = 0.0f, float b = 0.0f, float c = 0.0f, float d = 0.0f) {
  const float most = KIND == 5 ? 7.0f : a, clamped = up > most ? most : up < -most ? -most : up;
  const float factor = KIND == 5 ? clamped + 1.0f : KIND == 8 ? clamped : up;
  return activate_with<KIND>(x, a, b, c, d) * factor;
}
