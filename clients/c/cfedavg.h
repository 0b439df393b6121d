/* A client of CFedAvg in C99: messages as docs/wire.md specifies them, their envelope as docs/envelope.md does,
 * and the operations that a client needs to make them. Needs libc and libm only.
 *
 * A function that can fail returns CFEDAVG_OK or another number of `cfedavg_explain`, and then leaves its results
 * as they were. No function keeps a pointer to what it was given, unless the text says so. No function has state of
 * its own, so threads may call all of them at once.
 */
#ifndef CFEDAVG_H
#define CFEDAVG_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define CFEDAVG_API __declspec(dllexport)
#else
#define CFEDAVG_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Which coordinates a payload sends: all, drawn from a key, or listed; or its values are coordinates in another
 * basis: those of the rotated vector, or factors of matrices. CHUNKED stands in headers only, for listed coordinates
 * of which each chunk sends equally many. */
enum { CFEDAVG_ALL, CFEDAVG_DRAWN, CFEDAVG_LISTED, CFEDAVG_ROTATED, CFEDAVG_FACTORED, CFEDAVG_CHUNKED };
/* The number format of values: floats, or integer levels with scales. bf16 numbers are bits in uint16_t. PER_LEVEL
 * values are levels in int8_t, with a scale for each magnitude. FEW stands in headers only, for INT8 values that are
 * coded by their neighbours, since `top` is small. */
enum { CFEDAVG_FP32, CFEDAVG_FP64, CFEDAVG_BF16, CFEDAVG_INT8, CFEDAVG_INT16, CFEDAVG_PER_LEVEL, CFEDAVG_FEW };
/* The kinds of broadcasts. */
enum { CFEDAVG_CHAIN, CFEDAVG_CHANGES, CFEDAVG_WHOLE };

enum {
    CFEDAVG_OK,
    CFEDAVG_NO_MEMORY,
    CFEDAVG_BAD_ARGUMENT,
    CFEDAVG_NOT_FINITE,
    /* A payload that cannot be encoded. Codes of values below are used too. */
    CFEDAVG_OTHER_LENGTH,
    CFEDAVG_NOT_INCREASING,
    /* A message that is refused; in the order in which a message is checked. */
    CFEDAVG_TOO_LONG,
    CFEDAVG_NO_MESSAGE,
    CFEDAVG_UNKNOWN_VERSION,
    CFEDAVG_UNKNOWN_WHERE,
    CFEDAVG_UNKNOWN_KIND,
    CFEDAVG_UNKNOWN_CODING,
    CFEDAVG_NEEDS_VERSION_2,
    CFEDAVG_NEEDS_VERSION_1,
    CFEDAVG_NEEDS_NO_VERSION_3,
    CFEDAVG_OTHER_CLIENT,
    CFEDAVG_OTHER_SEQUENCE,
    CFEDAVG_OTHER_MODEL,
    CFEDAVG_TOO_MANY_VALUES,
    CFEDAVG_NOT_ALL_VALUES,
    CFEDAVG_MUST_BE_CODED,
    CFEDAVG_CUT_SHORT,
    CFEDAVG_EXTRA_BYTES,
    CFEDAVG_COORDINATES_LENGTH,
    CFEDAVG_COPIED_LENGTH,
    CFEDAVG_CODED_LENGTH,
    CFEDAVG_WRONG_CHECKSUM,
    CFEDAVG_WRONG_KEY,
    CFEDAVG_INDEX_BEYOND,
    CFEDAVG_INDEX_NUMBER,
    CFEDAVG_INDICES_END_EARLY,
    CFEDAVG_INDICES_HAVE_MORE,
    CFEDAVG_WRONG_ROTATION,
    CFEDAVG_WRONG_RANK,
    CFEDAVG_OTHER_BASIS,
    CFEDAVG_WRONG_TOP,
    CFEDAVG_SCALE_NOT_FINITE,
    CFEDAVG_VALUE_NOT_FINITE,
    CFEDAVG_LEVEL_TOO_LARGE,
    CFEDAVG_LEVEL_ZERO,
    CFEDAVG_VALUES_END_EARLY,
    CFEDAVG_VALUES_HAVE_MORE,
    /* An envelope that is refused. */
    CFEDAVG_UPDATE_CUT_SHORT,
    CFEDAVG_PAYLOAD_TOO_LONG,
    CFEDAVG_WRONG_LENGTHS,
    CFEDAVG_WRONG_BODY,
    CFEDAVG_NO_BROADCAST,
    CFEDAVG_WRONG_BROADCAST,
    CFEDAVG_BROADCAST_CHECKSUM,
    CFEDAVG_BROADCAST_CUT_SHORT,
    CFEDAVG_BROADCAST_DISTANCE,
    CFEDAVG_ERRORS /* how many codes there are */
};

/* Return a sentence that explains a code. */
CFEDAVG_API const char *cfedavg_explain(int error);

/* ---- The model ---- */

/* A trainable tensor: its name in UTF-8, its dtype such as "float32", and its shape. */
typedef struct {
    const char *name;
    const char *dtype;
    const uint64_t *shape;
    size_t axes;
} cfedavg_tensor;

/* The tensors of a model, in order: the map between the model and one vector of d numbers. */
typedef struct cfedavg_layout cfedavg_layout;

/* Make a layout, which `cfedavg_free_layout` frees. d may be at most 2^56. */
CFEDAVG_API int cfedavg_make_layout(const cfedavg_tensor *tensors, size_t n, cfedavg_layout **layout);
CFEDAVG_API void cfedavg_free_layout(cfedavg_layout *layout);
CFEDAVG_API uint64_t cfedavg_length(const cfedavg_layout *layout); /* d */
CFEDAVG_API uint64_t cfedavg_schema(const cfedavg_layout *layout); /* the hash in a message's header */

/* ---- Messages ---- */

/* What one client sends of a vector of d numbers. Value j of k levels is level[j] * scales[j / block]; with
 * block = 0 there is one scale for all (none if k is 0), else k / block scales, rounded up. With CFEDAVG_PER_LEVEL,
 * each block has `top` scales; value j has the sign of its level, and for magnitude m the scale
 * scales[(j / block) * top + m - 1]. */
typedef struct {
    uint64_t d;
    uint64_t k;       /* how many values are sent */
    int where;        /* CFEDAVG_ALL, _DRAWN, _LISTED, _ROTATED or _FACTORED */
    int kind;         /* CFEDAVG_FP32 ... _PER_LEVEL */
    int64_t *indices; /* with CFEDAVG_DRAWN and _LISTED: k increasing coordinates; else NULL */
    int64_t key;      /* with CFEDAVG_DRAWN, which coordinates `cfedavg_draw` returns for key and keep; with
                       * CFEDAVG_ROTATED, which signs: see docs/wire.md */
    uint64_t keep;
    uint32_t rotated; /* with CFEDAVG_ROTATED: how many numbers are rotated together, a power of two */
    uint32_t rank;    /* with CFEDAVG_FACTORED: of the factors, at least 1 */
    void *values;  /* k of float, double, uint16_t, int8_t or int16_t */
    float *scales; /* for levels only */
    uint32_t block;
    uint16_t top; /* the largest magnitude of a level */
} cfedavg_payload;

typedef struct {
    uint64_t client;
    uint64_t sequence;
    uint32_t round;
} cfedavg_sender;

typedef struct {
    int version;
    int where; /* CFEDAVG_ALL ... _CHUNKED */
    int kind;   /* CFEDAVG_FP32 ... _FEW */
    int coding; /* 0 plain, 1 coded */
    uint64_t schema;
    uint64_t d;
    uint64_t k;
    cfedavg_sender sender;
    uint64_t lengths[3]; /* bytes of the sections: coordinates, coded values, copied values */
} cfedavg_header;

/* What a receiver accepts; 0 in the first two fields is the default. */
typedef struct {
    uint64_t max_bytes;  /* of a message; default: 16 d + 65536, more than any useful payload needs */
    uint64_t max_values; /* k; default: d (2 d if rotated). A short message may hold many values: give it if you can. */
    int knows_sender;    /* whether client and sequence of the message must be the next two */
    uint64_t client;
    uint64_t sequence;
} cfedavg_limits;

/* Free the bytes of a message, an update or a body that a function below has made. */
CFEDAVG_API void cfedavg_free_bytes(uint8_t *bytes);

/* Encode a payload; `cfedavg_free_bytes` frees *message. `code_floats` is for floats of all coordinates: code them
 * if that makes the message shorter (such a message has version 2). The payload is not changed. */
CFEDAVG_API int cfedavg_encode(const cfedavg_layout *layout, const cfedavg_payload *payload,
                               const cfedavg_sender *sender, int code_floats, uint8_t **message, size_t *length);

/* Decode a message; `cfedavg_free_payload` frees what the payload points to. `limits` and `header` may be NULL.
 * Before the checksum is checked, nothing is allocated. */
CFEDAVG_API int cfedavg_decode(const uint8_t *data, size_t length, const cfedavg_layout *layout,
                               const cfedavg_limits *limits, cfedavg_payload *payload, cfedavg_header *header);
CFEDAVG_API void cfedavg_free_payload(cfedavg_payload *payload);

/* Return the number of values that a vector of the layout has in a basis: k of a payload with CFEDAVG_ROTATED or
 * CFEDAVG_FACTORED and these numbers. For any other `where`, return d. */
CFEDAVG_API uint64_t cfedavg_count(const cfedavg_layout *layout, int where, uint32_t rotated, uint32_t rank);

/* Make the vector of d numbers whose coordinates in another basis a payload holds, as a payload of all coordinates
 * with the values in fp32, or in fp64 if the payload has fp64 values. `cfedavg_free_payload` frees it. All receivers
 * get the same bits. */
CFEDAVG_API int cfedavg_expand(const cfedavg_layout *layout, const cfedavg_payload *payload,
                               cfedavg_payload *expanded);

/* Read a header alone. */
CFEDAVG_API int cfedavg_read_header(const uint8_t *data, size_t length, cfedavg_header *header);

/* ---- Compression ---- */

/* Fill `indices` with the coordinates of the k largest magnitudes, in increasing order; of equal ones, the lower
 * coordinates. `kind` is CFEDAVG_FP32 or CFEDAVG_FP64. Return CFEDAVG_NOT_FINITE if the vector holds NaN or Inf:
 * then they are among the coordinates. */
CFEDAVG_API int cfedavg_find_largest(const void *values, int kind, uint64_t d, uint64_t k, int64_t *indices);

/* Draw each coordinate below d with probability keep / 2^53; return how many are drawn, of which the first `room`
 * are written to `indices`. */
CFEDAVG_API uint64_t cfedavg_draw(int64_t key, uint64_t keep, uint64_t d, int64_t *indices, uint64_t room);

/* Return the random integer below 2^53 of a key and a coordinate. */
CFEDAVG_API uint64_t cfedavg_bits53(int64_t key, uint64_t coordinate);

/* Return the key for the random draws of one purpose, as docs/envelope.md defines it. */
CFEDAVG_API int64_t cfedavg_key(uint64_t seed, uint64_t round, uint64_t client, uint64_t purpose);

/* Round to bf16, ties to even; a number that is too large becomes the largest bf16 number. */
CFEDAVG_API uint16_t cfedavg_to_bf16(float value);
CFEDAVG_API float cfedavg_from_bf16(uint16_t bits);

/* Round each block of values to `top` times a scale and less: what the package calls int8(block) for top = 127,
 * int4(block) for top = 7. Fill n levels and n / block scales, rounded up. `block` and `top` must be above 0. */
CFEDAVG_API void cfedavg_to_levels(const float *values, uint64_t n, uint32_t block, int top, int8_t *levels,
                                   float *scales);

/* Add a message's payload to a model copy w of d numbers: of floats, or of bf16 bits. All copies of a version must be
 * bitwise equal: docs/envelope.md gives the operations. The payload must be one that `cfedavg_decode` returned for
 * the layout of w; give one with another basis to `cfedavg_expand` first. */
CFEDAVG_API void cfedavg_receive(float *w, const cfedavg_payload *payload);
CFEDAVG_API void cfedavg_receive_bf16(uint16_t *w, const cfedavg_payload *payload);

/* Return value i of a payload as a float: a level times its scale (or the scale of its magnitude), clipped to the
 * largest float. */
CFEDAVG_API float cfedavg_value(const cfedavg_payload *payload, uint64_t i);

/* Return the sum of squares in double precision, with the same bits on every machine. */
CFEDAVG_API double cfedavg_norm2(const float *values, uint64_t n);

/* ---- The envelope ---- */

/* A client's message to the server. After `cfedavg_unpack_update`, the fields point into the bytes given. */
typedef struct {
    const uint8_t *payload; /* of `cfedavg_encode` */
    size_t payload_length;
    const char *facts; /* a JSON object, not ended by a 0 */
    size_t facts_length;
    const uint8_t *uncompressed; /* the arrays that are never compressed */
    size_t uncompressed_length;
} cfedavg_update;

/* Pack a client's message; `cfedavg_free_bytes` frees *message. */
CFEDAVG_API int cfedavg_pack_update(const cfedavg_update *update, uint8_t **message, size_t *length);

/* Unpack one whose payload has at most `most` bytes and whose arrays have `uncompressed` bytes. The caller parses
 * the facts. */
CFEDAVG_API int cfedavg_unpack_update(const uint8_t *data, size_t length, uint64_t most, uint64_t uncompressed,
                                      cfedavg_update *update);

/* Return the field `check` of a reply: a checksum of its other fields. */
CFEDAVG_API uint32_t cfedavg_check_reply(uint32_t generation, uint32_t number, uint64_t incarnation,
                                         const uint8_t *message, size_t length);

/* The body of a request: a broadcast (or the vector x), and the arrays that are never compressed. After
 * `cfedavg_unpack_body`, the fields point into the bytes given. */
typedef struct {
    const uint8_t *broadcast;
    size_t broadcast_length;
    const uint8_t *uncompressed;
    size_t uncompressed_length;
} cfedavg_body;

/* Pack a body; `cfedavg_free_bytes` frees *data. */
CFEDAVG_API int cfedavg_pack_body(const cfedavg_body *body, uint8_t **data, size_t *length);
CFEDAVG_API int cfedavg_unpack_body(const uint8_t *data, size_t length, cfedavg_body *body);

/* A broadcast. Its pointers lead into the bytes that `cfedavg_unpack_broadcast` was given. */
typedef struct {
    int kind; /* CFEDAVG_CHAIN, _CHANGES or _WHOLE */
    uint32_t generation;
    uint32_t round;
    uint64_t hash;    /* with generation and round: the version to which it leads */
    uint64_t digest;  /* of the model copy at that version; 0 for a chain */
    uint32_t earlier; /* the number of earlier versions from which a client can follow */
    const uint8_t *list;
    const uint8_t *messages;
    size_t length; /* of all messages */
} cfedavg_broadcast;

CFEDAVG_API int cfedavg_unpack_broadcast(const uint8_t *data, size_t length, cfedavg_broadcast *broadcast);

/* Return number i of the list: see docs/protocol.md. i is below `earlier`, or equal to it for a chain. */
CFEDAVG_API uint64_t cfedavg_listed(const cfedavg_broadcast *broadcast, uint32_t i);

/* Return the first 64 bits of the SHA-256 of some bytes: the digest of a message or of a model copy. */
CFEDAVG_API uint64_t cfedavg_digest(const void *data, size_t length);

/* Return the hash of the first version of a generation, and of the version after another one. */
CFEDAVG_API uint64_t cfedavg_first_version(uint32_t generation, uint32_t round, uint64_t digest);
CFEDAVG_API uint64_t cfedavg_next_version(uint64_t hash, const uint8_t *message, size_t length);

#ifdef __cplusplus
}
#endif

#endif
