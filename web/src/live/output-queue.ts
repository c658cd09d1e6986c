import type { Terminal } from '@xterm/xterm'

/**
 * Maximum number of bytes that the terminal parses at a time, which takes about 6 ms. The browser
 * draws and processes input in between.
 */
const SLICE = 32 * 1024
const CR = 13
const LF = 10

/** The parts of a terminal that the queue uses. */
export type Target = Pick<Terminal, 'write' | 'onLineFeed' | 'rows'> & {
  options: Pick<Terminal['options'], 'scrollback'>
  buffer: { active: Pick<Terminal['buffer']['active'], 'type' | 'length' | 'cursorY'> }
}

/** Output that has not been parsed yet. */
interface Piece {
  bytes: Uint8Array
  /** True if the piece consists of printable ASCII characters and line ends. */
  isPlain: boolean
  lines: number
}

function pieceOf(bytes: Uint8Array): Piece {
  let lines = 0
  let isPlain = true
  for (const byte of bytes) {
    if (byte === LF) lines++
    else if ((byte < 32 && byte !== CR) || byte > 126) isPlain = false
  }
  return { bytes, isPlain, lines }
}

/** Returns the position after line end number `number` of a text, counted from 1. */
function afterLine(bytes: Uint8Array, number: number): number {
  let at = 0
  for (let line = 0; line < number; line++) at = bytes.indexOf(LF, at) + 1
  return at
}

/**
 * Output that a terminal has not parsed yet. The terminal receives one slice at a time. If it had a
 * longer queue, it would continue by nested timers, which browsers delay by 4 ms each.
 *
 * If more lines wait than the terminal retains, the first ones are dropped: they would leave the
 * terminal before they are drawn.
 */
export class OutputQueue {
  private pieces: Piece[] = []
  private isWriting = false
  /** Number of the latest reset. Slices before it do not count as parsed. */
  private epoch = 0
  private readonly turns = new MessageChannel()
  /** Line ends that were parsed since the last piece that is not plain. */
  private parsed = 0
  /** Lines that the terminal has fed since then. */
  private fed = 0

  constructor(
    private readonly term: Target,
    /** Receives the number of bytes that the terminal has parsed, or that were dropped. */
    private readonly onParsed: (bytes: number) => void,
  ) {
    term.onLineFeed(() => this.fed++)
    // A message is a task of its own, without a delay.
    this.turns.port1.onmessage = () => {
      this.isWriting = false
      this.next()
    }
  }

  push(bytes: Uint8Array) {
    this.pieces.push(pieceOf(bytes))
    if (!this.isWriting) this.next()
  }

  /** Discards the output that was not parsed. */
  reset() {
    this.pieces = []
    this.parsed = 0
    this.fed = 0
    this.epoch++
  }

  close() {
    this.reset()
    this.turns.port1.close()
  }

  private next() {
    const dropped = this.drop()
    const { bytes, isPlain, lines } = this.take()
    if (bytes.length === 0) return
    const { epoch } = this
    this.isWriting = true
    this.term.write(bytes, () => {
      if (epoch === this.epoch) {
        this.parsed = isPlain ? this.parsed + lines : 0
        if (!isPlain) this.fed = 0
        this.onParsed(bytes.length + dropped)
      }
      this.turns.port2.postMessage(null)
    })
  }

  /** Drops the waiting lines that the terminal would not retain. Returns their number of bytes. */
  private drop(): number {
    const end = this.pieces.findIndex((piece) => !piece.isPlain)
    const plain = this.pieces.slice(0, end < 0 ? undefined : end)
    const { term } = this
    const retained = (term.options.scrollback ?? 0) + term.rows
    let surplus = plain.reduce((sum, piece) => sum + piece.lines, 0) - retained
    if (surplus <= 0 || !this.scrolls()) return 0
    let [count, dropped] = [0, 0]
    for (let piece = plain[0]; piece && surplus > piece.lines; piece = plain[++count]) {
      surplus -= piece.lines
      dropped += piece.bytes.length
    }
    const last = plain[count]
    if (!last) return 0
    const at = afterLine(last.bytes, surplus)
    // Only a line end with a carriage return determines the column of the next character.
    if (last.bytes[at - 2] !== CR) return 0
    const rest = { ...last, bytes: last.bytes.subarray(at), lines: last.lines - surplus }
    this.pieces.splice(0, count + 1, rest)
    return dropped + at
  }

  /**
   * Returns whether each further line scrolls the terminal. The cursor is then in the last row of a
   * full buffer, and all line ends of the latest plain text had an effect. Otherwise, the text could
   * be a part of a control sequence.
   */
  private scrolls(): boolean {
    const { buffer, options, rows } = this.term
    const { type, length, cursorY } = buffer.active
    const isFull = type === 'normal' && length === (options.scrollback ?? 0) + rows && cursorY === rows - 1
    return isFull && this.parsed > rows && this.parsed === this.fed
  }

  /** Removes the next bytes, and joins small pieces of one kind. */
  private take(): Piece {
    const first = this.pieces[0]
    if (!first) return pieceOf(new Uint8Array())
    if (first.bytes.length > SLICE) {
      const slice = { ...pieceOf(first.bytes.subarray(0, SLICE)), isPlain: first.isPlain }
      this.pieces[0] = { ...first, bytes: first.bytes.subarray(SLICE), lines: first.lines - slice.lines }
      return slice
    }
    let [count, length, lines] = [0, 0, 0]
    while (count < this.pieces.length) {
      const piece = this.pieces[count]!
      if (piece.isPlain !== first.isPlain || length + piece.bytes.length > SLICE) break
      length += piece.bytes.length
      lines += piece.lines
      count++
    }
    const taken = this.pieces.splice(0, count)
    if (taken.length === 1) return first
    const bytes = new Uint8Array(length)
    let at = 0
    for (const piece of taken) {
      bytes.set(piece.bytes, at)
      at += piece.bytes.length
    }
    return { bytes, isPlain: first.isPlain, lines }
  }
}
