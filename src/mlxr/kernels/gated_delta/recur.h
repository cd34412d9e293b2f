// log(1 + t) for 0 <= t <= 1, also where 1 + t is 1.
FUNCTION float small_log(float t) { return t < 1e-3f ? t - 0.5f * t * t : log_of(1.0f + t); }
