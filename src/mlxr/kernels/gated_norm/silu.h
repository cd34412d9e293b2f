FUNCTION float silu_of(float x) { return divide(x, 1.0f + exp_of(-x)); }
