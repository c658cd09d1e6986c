/** Entry of a tar archive. */
export interface TarEntry {
  path: string
  kind: 'file' | 'directory' | 'symlink'
  mode: number
  /** Time of the last change, in seconds since 1970. */
  modified: number
  size: number
  target?: string
}

const BLOCK = 512
const encoder = new TextEncoder()

function header(name: Uint8Array, type: string, entry: TarEntry, size: number, target: Uint8Array): Uint8Array {
  const block = new Uint8Array(BLOCK)
  const put = (at: number, text: string) => block.set(encoder.encode(text), at)
  const octal = (at: number, width: number, value: number) =>
    put(
      at,
      Math.max(0, Math.floor(value))
        .toString(8)
        .padStart(width - 1, '0')
        .slice(1 - width),
    )
  block.set(name.subarray(0, 100), 0)
  octal(100, 8, entry.mode & 0o7777)
  octal(108, 8, 0)
  octal(116, 8, 0)
  // Larger sizes are in the extended header.
  octal(124, 12, Math.min(size, 0o77777777777))
  octal(136, 12, entry.modified)
  put(148, '        ')
  put(156, type)
  block.set(target.subarray(0, 100), 157)
  put(257, 'ustar\u000000')
  let sum = 0
  for (const byte of block) sum += byte
  put(148, `${sum.toString(8).padStart(6, '0')}\0 `)
  return block
}

/** A record of an extended header: its length, which includes its own digits, a key and a value. */
function record(key: string, value: string): string {
  const rest = ` ${key}=${value}\n`
  const bytes = encoder.encode(rest).length
  let length = bytes
  while (length !== bytes + String(length).length) length = bytes + String(length).length
  return `${length}${rest}`
}

/** Returns the bytes that fill the last block of a file. */
export const tarPadding = (size: number) => new Uint8Array((BLOCK - (size % BLOCK)) % BLOCK)

/** Returns the end of an archive. */
export const tarEnd = () => new Uint8Array(2 * BLOCK)

/** Returns the blocks that precede the content of an entry. */
export function tarHeader(entry: TarEntry): Uint8Array<ArrayBuffer>[] {
  const path = entry.kind === 'directory' ? `${entry.path}/` : entry.path
  const [name, target] = [encoder.encode(path), encoder.encode(entry.target ?? '')]
  const type = { file: '0', directory: '5', symlink: '2' }[entry.kind]
  const blocks: Uint8Array[] = []
  const records = [
    name.length > 100 ? record('path', path) : '',
    target.length > 100 ? record('linkpath', entry.target ?? '') : '',
    entry.size > 0o77777777777 ? record('size', String(entry.size)) : '',
  ].join('')
  if (records) {
    const body = encoder.encode(records)
    const extended = { ...entry, mode: 0o644 }
    blocks.push(header(encoder.encode('PaxHeader'), 'x', extended, body.length, new Uint8Array()), body)
    blocks.push(tarPadding(body.length))
  }
  blocks.push(header(name, type, entry, entry.size, target))
  return blocks as Uint8Array<ArrayBuffer>[]
}
