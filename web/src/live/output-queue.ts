import type { Terminal } from '@xterm/xterm'

/**
 * Maximum number of bytes that the terminal parses at a time, which takes about 6 ms. The browser
 * draws and processes input in between.
 */
const SLICE = 32 * 1024

/**
 * Output that a terminal has not parsed yet. The terminal receives one slice at a time. If it had a
 * longer queue, it would continue by nested timers, which browsers delay by 4 ms each.
 */
export class OutputQueue {
  private pieces: Uint8Array[] = []
  private isWriting = false
  /** Number of the latest reset. Slices before it do not count as parsed. */
  private epoch = 0
  private readonly turns = new MessageChannel()

  constructor(
    private readonly term: Terminal,
    /** Receives the number of bytes that the terminal has parsed. */
    private readonly onParsed: (bytes: number) => void,
  ) {
    // A message is a task of its own, without a delay.
    this.turns.port1.onmessage = () => {
      this.isWriting = false
      this.next()
    }
  }

  push(bytes: Uint8Array) {
    this.pieces.push(bytes)
    if (!this.isWriting) this.next()
  }

  /** Discards the output that was not parsed. */
  reset() {
    this.pieces = []
    this.epoch++
  }

  close() {
    this.reset()
    this.turns.port1.close()
  }

  private next() {
    const slice = this.take()
    if (slice.length === 0) return
    const { epoch } = this
    this.isWriting = true
    this.term.write(slice, () => {
      if (epoch === this.epoch) this.onParsed(slice.length)
      this.turns.port2.postMessage(null)
    })
  }

  /** Removes the next bytes, and joins small pieces. */
  private take(): Uint8Array {
    const first = this.pieces[0]
    if (!first) return new Uint8Array()
    if (first.length >= SLICE || this.pieces.length === 1) {
      if (first.length <= SLICE) this.pieces.shift()
      else this.pieces[0] = first.subarray(SLICE)
      return first.subarray(0, SLICE)
    }
    let [count, length] = [0, 0]
    while (count < this.pieces.length && length + this.pieces[count]!.length <= SLICE) {
      length += this.pieces[count++]!.length
    }
    const slice = new Uint8Array(length)
    let at = 0
    for (const piece of this.pieces.splice(0, count)) {
      slice.set(piece, at)
      at += piece.length
    }
    return slice
  }
}
