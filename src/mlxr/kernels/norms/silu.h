FUNCTION float silu_of(float x) { return quotient_of(x, 1.0f + exp_of(-x)); }
