// What one thread can do at best: int8 deltas decoded, averaged and applied by Nesterov, everything once through memory.
void merge_int8(long blocks, int learners, const signed char **quantised, const float **scales, const float *shares,
                const float *parameters, const float *momentum, float *new_parameters, float *new_momentum, float lr, float mu) {
    for (long block = 0; block < blocks; block++) {
        float delta[256] = {0};
        for (int m = 0; m < learners; m++) {
            const signed char *q = quantised[m] + 256 * block;
            const float scale = shares[m] * scales[m][block];
            for (int i = 0; i < 256; i++) delta[i] += scale * q[i];
        }
        for (int i = 0; i < 256; i++) {
            const long at = 256 * block + i;
            const float moved = mu * momentum[at] + delta[i];
            new_momentum[at] = moved;
            new_parameters[at] = parameters[at] - lr * (delta[i] + mu * moved);
        }
    }
}
