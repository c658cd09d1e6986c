/** Returns a module of the world `jiffy-core/1` that answers each request with a text. */
export function moduleOf(text) {
  const response = new TextEncoder().encode(`200\ncontent-type: text/html\n\n${text}`)
  const number = (n) => (n < 128 ? [n] : [(n & 127) | 128, ...number(n >> 7)])
  // Constants are signed: the last byte has 6 bits of the number.
  const constant = (n) => [0x41, ...(n < 64 ? [n] : [(n & 127) | 128, ...number(n >> 7)]), 0x0b]
  const string = (s) => [s.length, ...new TextEncoder().encode(s)]
  const section = (id, ...items) => {
    const body = [...number(items.length), ...items.flat()]
    return [id, ...number(body.length), ...body]
  }
  const code = (n) => [constant(n).length + 1, 0, ...constant(n)]
  const names = ['jiffy_buf', 'jiffy_handle', 'jiffy_out'].map((name, index) => [...string(name), 0, index])
  const types = [
    [0x60, 1, 0x7f, 1, 0x7f],
    [0x60, 2, 0x7f, 0x7f, 1, 0x7f],
    [0x60, 0, 1, 0x7f],
  ]
  return Buffer.from([
    ...[0, 0x61, 0x73, 0x6d, 1, 0, 0, 0],
    ...section(1, ...types),
    ...section(3, [0], [1], [2]),
    ...section(5, [0, 17]),
    ...section(7, [...string('memory'), 2, 0], ...names),
    ...section(10, code(65536), code(response.length), code(16)),
    ...section(11, [0, ...constant(16), ...number(response.length), ...response]),
  ])
}
