/* Send the 1% largest numbers of an update as bf16, and read the message again. */
#include <stdio.h>
#include <stdlib.h>

#include "../cfedavg.h"

static void must(int error)
{
    if (error) {
        printf("%s\n", cfedavg_explain(error));
        exit(1);
    }
}

int main(void)
{
    static float update[1000];
    int64_t indices[10];
    uint16_t rounded[10];
    const uint64_t shape[] = {40, 25};
    const cfedavg_tensor weight = {"weight", "float32", shape, 2};
    const cfedavg_sender sender = {3, (uint64_t)1 << 32 | 7, 6}; /* client 3, request 1.7, round 6 */
    cfedavg_payload payload = {.d = 1000, .k = 10, .where = CFEDAVG_LISTED, .kind = CFEDAVG_BF16}, got;
    cfedavg_layout *layout;
    uint8_t *message;
    size_t length;

    for (int j = 0; j < 1000; j++) {
        update[j] = (float)(j * 7919 % 1000) - 500;
    }
    must(cfedavg_make_layout(&weight, 1, &layout));
    must(cfedavg_find_largest(update, CFEDAVG_FP32, 1000, 10, indices));
    for (int i = 0; i < 10; i++) {
        rounded[i] = cfedavg_to_bf16(update[indices[i]]); /* what this loses belongs into the residual */
    }
    payload.indices = indices;
    payload.values = rounded;
    must(cfedavg_encode(layout, &payload, &sender, 0, &message, &length));
    must(cfedavg_decode(message, length, layout, NULL, &got, NULL));
    printf("%zu bytes; coordinate %d is %g\n", length, (int)got.indices[1], (double)cfedavg_value(&got, 1));
    cfedavg_free_payload(&got);
    cfedavg_free_layout(layout);
    cfedavg_free_bytes(message);
    return 0;
}
