#include <stddef.h>

/// Answers with the CRC-32 of the body as eight hexadecimal digits. Returns the length of the
/// response, which is written to `response`, of RESPONSE_BYTES.
size_t handle(const char *request, size_t length, char *response);

#define RESPONSE_BYTES 4096
