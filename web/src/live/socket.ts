import { useSyncExternalStore } from 'react'
import type { Schemas } from '../api/client'

export type SandboxEvent = Schemas['Event']
export type Usage = Record<string, Schemas['Metric']>

/** State of a terminal as the daemon reports it. */
export type Ending = { state: 'exited' | 'lost'; reason: string }

/** Receives the messages of one terminal. */
export interface StreamListener {
  /** The terminal is shown. Its output follows from the beginning of the retained output. */
  opened: (terminal: string) => void
  output: (bytes: Uint8Array) => void
  ended: (ending: Ending) => void
  failed: (message: string) => void
  /** The connection to the daemon was lost, and is being re-established. */
  disconnected: () => void
  /** The connection exists again: the stream must be attached again. */
  connected: () => void
}

/** Receives new events. Without events, earlier ones were lost and everything must be requested again. */
export type EventListener = (events: SandboxEvent[] | undefined) => void

/** Close code of the daemon if the session has ended. */
const SESSION_ENDED = 4401
const FIRST_DELAY = 200
const MAX_DELAY = 5000
/** Maximum size of an input message; the daemon rejects larger messages. */
const MAX_INPUT = 32 * 1024

/** WebSocket of this browser tab. Opened with the first terminal or listener, and reconnected after a loss. */
class LiveSocket {
  private socket: WebSocket | undefined
  private readonly streams = new Map<number, StreamListener>()
  private next = 1
  private delay = FIRST_DELAY
  private readonly watchers = new Set<() => void>()
  private listener: EventListener | undefined
  /** Id of the last event. */
  private last: string | undefined
  private hasConnected = false
  private displayed = ''
  private usage: Usage = {}
  isConnected = false

  /** Passes all further events to the listener. Returns a function that ends this. */
  follow(listener: EventListener): () => void {
    this.listener = listener
    if (this.isConnected) this.send({ type: 'follow', after: this.last })
    else this.connect()
    return () => {
      this.listener = undefined
    }
  }

  /** Selects the sandboxes whose usage is sent every second. */
  display(sandboxes: string[]) {
    const displayed = [...sandboxes].sort().join(',')
    if (displayed === this.displayed) return
    this.displayed = displayed
    this.sendDisplayed()
  }

  getUsage = () => this.usage

  private sendDisplayed() {
    this.send({ type: 'display', sandboxes: this.displayed ? this.displayed.split(',') : [] })
  }

  /** Registers a stream. The listener is informed when the connection exists. */
  register(listener: StreamListener): number {
    const stream = this.next++
    this.streams.set(stream, listener)
    if (this.isConnected) queueMicrotask(() => listener.connected())
    else this.connect()
    return stream
  }

  unregister(stream: number) {
    this.send({ type: 'detach', stream })
    this.streams.delete(stream)
  }

  send(message: Record<string, unknown>) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message))
  }

  input(stream: number, bytes: Uint8Array) {
    if (this.socket?.readyState !== WebSocket.OPEN) return
    for (let at = 0; at < bytes.length; at += MAX_INPUT) {
      const piece = bytes.subarray(at, at + MAX_INPUT)
      const message = new Uint8Array(piece.length + 4)
      new DataView(message.buffer).setUint32(0, stream)
      message.set(piece, 4)
      this.socket.send(message)
    }
  }

  subscribe = (watcher: () => void) => {
    this.watchers.add(watcher)
    return () => this.watchers.delete(watcher)
  }

  private connect() {
    if (this.socket) return
    const scheme = location.protocol === 'https:' ? 'wss' : 'ws'
    const socket = new WebSocket(`${scheme}://${location.host}/live`)
    socket.binaryType = 'arraybuffer'
    this.socket = socket
    socket.onopen = () => {
      this.delay = FIRST_DELAY
      this.setConnected(true)
      if (this.listener) {
        this.send({ type: 'follow', after: this.last })
        // Events since the former connection are unknown.
        if (this.hasConnected && this.last === undefined) this.listener(undefined)
      }
      this.hasConnected = true
      if (this.displayed) this.sendDisplayed()
      for (const listener of [...this.streams.values()]) listener.connected()
    }
    socket.onmessage = (event: MessageEvent) => this.receive(event.data)
    socket.onclose = (event) => {
      this.socket = undefined
      this.setConnected(false)
      for (const listener of [...this.streams.values()]) listener.disconnected()
      // This call fails, so that the page shows the sign-in.
      if (event.code === SESSION_ENDED) {
        void import('../api/client').then(({ callJson }) => callJson('GET', '/session').catch(() => {}))
        return
      }
      if (this.streams.size === 0 && !this.listener) return
      setTimeout(() => this.connect(), this.delay * (1 + Math.random() / 4))
      this.delay = Math.min(MAX_DELAY, this.delay * 2)
    }
  }

  private receive(message: unknown) {
    if (message instanceof ArrayBuffer) {
      const stream = new DataView(message).getUint32(0)
      this.streams.get(stream)?.output(new Uint8Array(message, 4))
      return
    }
    const notice = JSON.parse(String(message)) as {
      type: string
      stream: number
      terminal?: string
      state?: Ending['state']
      reason?: string
      message?: string
      events?: SandboxEvent[]
      next?: string
      gap?: boolean
      sandboxes?: Usage
    }
    if (notice.type === 'events') {
      this.last = notice.next ?? this.last
      if (notice.gap) this.listener?.(undefined)
      else if (notice.events?.length) this.listener?.(notice.events)
      return
    }
    if (notice.type === 'usage') {
      this.usage = notice.sandboxes ?? {}
      for (const watcher of this.watchers) watcher()
      return
    }
    const listener = this.streams.get(notice.stream)
    if (notice.type === 'opened') listener?.opened(notice.terminal ?? '')
    else if (notice.type === 'failed') listener?.failed(notice.message ?? '')
    else if (notice.type === 'ended') {
      listener?.ended({ state: notice.state ?? 'lost', reason: notice.reason ?? '' })
    }
  }

  private setConnected(isConnected: boolean) {
    this.isConnected = isConnected
    for (const watcher of this.watchers) watcher()
  }
}

export const live = new LiveSocket()

/** Usage of the displayed sandboxes, which changes every second. */
export function useLiveUsage(): Usage {
  return useSyncExternalStore(live.subscribe, live.getUsage)
}

export function useLiveConnection(): boolean {
  return useSyncExternalStore(live.subscribe, () => live.isConnected)
}
