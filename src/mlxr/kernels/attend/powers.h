// Exponents of e as exponents of two, in which kernels of attention reckon.
FUNCTION float to_power(float exponent) { return exponent * 1.4426950408889634f; }
