// Messages of a stream of the Connect protocol: flags, length, JSON.
const HEAD = 5;

export function envelope(message) {
  const json = new TextEncoder().encode(JSON.stringify(message));
  const bytes = new Uint8Array(HEAD + json.length);
  new DataView(bytes.buffer).setUint32(1, json.length);
  bytes.set(json, HEAD);
  return bytes;
}

export function* messages(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  for (let at = 0; at + HEAD <= bytes.length; ) {
    const end = at + HEAD + view.getUint32(at + 1);
    yield JSON.parse(new TextDecoder().decode(bytes.subarray(at + HEAD, end)));
    at = end;
  }
}
