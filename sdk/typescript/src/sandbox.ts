// Sandboxes.
import { createReadStream, createWriteStream } from 'node:fs'
import { stat } from 'node:fs/promises'
import type { Socket } from 'node:net'
import { Readable, Transform } from 'node:stream'
import { pipeline } from 'node:stream/promises'
import { setTimeout as sleep } from 'node:timers/promises'
import * as e2b from 'e2b'
import { type Keep, firstSuccess, orAborted, outcome, select } from './attempts.js'
import { commandsThatEnd } from './commands.js'
import * as calls from './calls.js'
import { type Connection, withAddress } from './connection.js'
import { InUseError, PortClosedError, SandboxNotFoundError, UnavailableError, classes } from './errorCodes.js'
import { UnreachableError, errorOf } from './errors.js'
import { importImage } from './images.js'
import type * as m from './models.js'
import { type SandboxOptions, networkBody, createBody } from './options.js'
import { openPort } from './ports.js'
import { Snapshot } from './resources.js'
import { type Call, send } from './transport.js'

const PORT_POLL_MS = 50
// Interval between attempts to delete a snapshot that is being stored.
const DISCARD_POLL_MS = 20
const DEFAULT_CHANGES = 10_000

/** Receives the number of copied bytes and the size of the file. */
export type Progress = (bytes: number, size: number) => void

type CallOptions = Pick<Connection, 'requestTimeoutMs' | 'signal'>

/** Options of `diff`: the maximum number of files. */
export type DiffOptions = { limit?: number } & CallOptions

/** Snapshot, or id or name of a snapshot or a sandbox. */
export type Compared = string | e2b.SnapshotInfo

const isCompared = (value: unknown): value is Compared =>
  typeof value === 'string' || (typeof value === 'object' && value !== null && 'snapshotId' in value)
const idOf = (value: Compared) => (typeof value === 'string' ? value : value.snapshotId)

/** Options of `tryEach`. */
export interface TryOptions<S, T> {
  /** Selects an outcome, or its index. Defaults to the first function that returned. */
  keep?: Keep<S, T>
  /** Timeout of the forks. */
  timeoutMs?: number
  signal?: AbortSignal
}

interface Internals {
  origin?: m.Origin
}

/** A sandbox. Has all methods of `Sandbox` of `e2b`, and the operations of Jiffy. */
export class Sandbox extends e2b.Sandbox implements AsyncDisposable {
  #origin?: m.Origin

  /** @hidden */
  constructor(options: ConstructorParameters<typeof e2b.Sandbox>[0] & Internals) {
    super(options)
    this.#origin = options.origin
    commandsThatEnd(this.commands)
  }

  protected static override resolveOpts<T extends Connection>(options?: T): T | undefined {
    return withAddress(super.resolveOpts(options))
  }

  /** Creates a sandbox. */
  static override create<S extends typeof e2b.Sandbox>(this: S, options?: SandboxOptions): Promise<InstanceType<S>>
  static override create<S extends typeof e2b.Sandbox>(
    this: S,
    template: string,
    options?: SandboxOptions
  ): Promise<InstanceType<S>>
  static override create<S extends typeof e2b.Sandbox>(
    this: S,
    first?: string | SandboxOptions,
    second?: SandboxOptions
  ): Promise<InstanceType<S>> {
    const [template, given] = typeof first === 'string' ? [first, second] : [first?.template, first]
    return create(this, template, given)
  }

  // ---- Calls of `e2b` with the errors and retries of Jiffy
  static override kill(id: string, options?: Connection): Promise<boolean> {
    return send(resolved(this, options), calls.kill(id))
  }

  static override getInfo(id: string, options?: Connection): Promise<e2b.SandboxInfo> {
    return send(resolved(this, options), calls.info(id))
  }

  static override getMetrics(id: string, options?: e2b.SandboxMetricsOpts): Promise<e2b.SandboxMetrics[]> {
    return send(resolved(this, options), calls.metrics(id, options?.start, options?.end))
  }

  static override setTimeout(id: string, timeoutMs: number, options?: Connection): Promise<void> {
    return send(resolved(this, options), calls.setTimeout(id, timeoutMs))
  }

  static override updateNetwork(id: string, network: e2b.SandboxNetworkUpdate, options?: Connection): Promise<void> {
    return send(resolved(this, options), calls.setNetwork(id, networkBody(network) ?? {}))
  }

  static override pause(id: string, options?: e2b.SandboxPauseOpts): Promise<boolean> {
    return send(resolved(this, options), calls.pause(id, options?.keepMemory))
  }

  static override async createSnapshot(id: string, options?: e2b.CreateSnapshotOpts): Promise<Snapshot> {
    const connection = resolved(this, options)
    return new Snapshot(await send(connection, calls.snapshot(id, { name: options?.name })), connection)
  }

  static override deleteSnapshot(id: string, options?: Connection): Promise<boolean> {
    return send(resolved(this, options), calls.deleteSnapshot(id))
  }

  protected static override connectSandbox(id: string, options?: e2b.SandboxConnectOpts): Promise<m.Created> {
    return send(resolved(this, options), calls.connect(id, options))
  }

  static override async connect<S extends typeof e2b.Sandbox>(
    this: S,
    id: string,
    options?: e2b.SandboxConnectOpts
  ): Promise<InstanceType<S>> {
    const connection = resolved(this, options)
    return build(this, await send(connection, calls.connect(id, options)), connection)
  }

  static override async fork<S extends typeof e2b.Sandbox>(
    this: S,
    id: string,
    options?: e2b.SandboxForkOpts
  ): Promise<(InstanceType<S> | Error)[]> {
    const call = calls.fork(id, options?.timeoutMs, options?.count)
    const connection = resolved(this, options)
    const entries = await send(connection, call)
    return entries.map((entry) => (entry instanceof Error ? entry : build(this, entry, connection)))
  }

  override kill(options?: CallOptions): Promise<boolean> {
    return this.#send(calls.kill(this.sandboxId), options)
  }

  override getInfo(options?: CallOptions): Promise<e2b.SandboxInfo> {
    return this.#send(calls.info(this.sandboxId), options)
  }

  override getMetrics(options?: e2b.SandboxMetricsOpts): Promise<e2b.SandboxMetrics[]> {
    return this.#send(calls.metrics(this.sandboxId, options?.start, options?.end), options)
  }

  override setTimeout(timeoutMs: number, options?: CallOptions): Promise<void> {
    return this.#send(calls.setTimeout(this.sandboxId, timeoutMs), options)
  }

  override updateNetwork(network: e2b.SandboxNetworkUpdate, options?: CallOptions): Promise<void> {
    return this.#send(calls.setNetwork(this.sandboxId, networkBody(network) ?? {}), options)
  }

  override pause(options?: e2b.SandboxPauseOpts): Promise<boolean> {
    return this.#send(calls.pause(this.sandboxId, options?.keepMemory), options)
  }

  override createSnapshot(options?: e2b.CreateSnapshotOpts): Promise<Snapshot> {
    return this.snapshot(options)
  }

  override async connect(options?: e2b.SandboxConnectOpts): Promise<this> {
    const created = await this.#send(calls.connect(this.sandboxId, options), options)
    this.#origin = created.origin
    return this
  }

  // ---- Origin of the guest, as it was when the object was created
  /** Origin of the guest. */
  get bootMode(): m.BootMode | undefined {
    return this.#origin?.bootMode
  }
  /** Time from the request to the response of the agent, in milliseconds. */
  get bootMs(): number | undefined {
    return this.#origin?.bootMs
  }
  /** Engine that isolates the sandbox. */
  get engine(): m.EngineName | undefined {
    return this.#origin?.engine
  }
  /** Name of the sandbox. */
  get name(): string | undefined {
    return this.#origin?.name
  }
  /** Id of the sandbox that this sandbox was forked from. */
  get forkedFrom(): string | undefined {
    return this.#origin?.forkedFrom
  }

  // ---- Snapshots and forks
  /**
   * Takes a snapshot. The sandbox continues to run.
   *
   * @param options `ack: 'captured'` returns when the memory is frozen (milliseconds), `stored`
   *   (the default) when the files are complete. `durable` waits until the store has the snapshot.
   */
  async snapshot(options: calls.SnapshotOptions & CallOptions = {}): Promise<Snapshot> {
    const info = await this.#send(calls.snapshot(this.sandboxId, options), options)
    return new Snapshot(info, this.#connection())
  }

  /** Rolls the sandbox back to a snapshot. The id remains; running commands end. */
  async rollback(snapshot: string | e2b.SnapshotInfo, options?: CallOptions): Promise<this> {
    const target = typeof snapshot === 'string' ? snapshot : snapshot.snapshotId
    await this.#send(calls.rollback(this.sandboxId, target), options)
    return this
  }

  /** Retains this child of a fork and removes its siblings. Returns their ids. */
  promote(options?: CallOptions): Promise<string[]> {
    return this.#send(calls.promote(this.sandboxId), options)
  }

  /**
   * Runs `block`, and rolls the sandbox back if it throws. The error continues after the rollback.
   * If the rollback fails, its error is thrown with the error of the block as cause, and the
   * snapshot remains.
   */
  async checkpoint<T>(block: (snapshot: Snapshot) => Promise<T>): Promise<T> {
    const snapshot = await this.snapshot({ ack: 'captured' })
    let result: T
    try {
      result = await block(snapshot)
    } catch (error) {
      try {
        await this.rollback(snapshot)
      } catch (failure) {
        if (failure instanceof Error) failure.cause ??= error
        throw failure
      }
      await discard(snapshot)
      throw error
    }
    await discard(snapshot)
    return result
  }

  /**
   * Runs each function in a fork of its own, in parallel, and promotes the selected fork. The other
   * forks are removed, also if a function fails, `keep` throws, or the call is aborted. This
   * sandbox continues to run unchanged.
   *
   * @param functions Functions that receive their fork.
   * @param options `keep` receives all outcomes, and returns one of them, its index, or
   *   `undefined`. Defaults to the first function that returned. `timeoutMs` is the timeout of the
   *   forks.
   */
  async tryEach<T>(
    functions: Iterable<(fork: this) => Promise<T> | T>,
    options: TryOptions<this, T> = {}
  ): Promise<m.Outcome<this, T>> {
    const { keep = firstSuccess, timeoutMs, signal } = options
    const attempts = [...functions]
    if (attempts.length === 0) throw new e2b.InvalidArgumentError('tryEach requires at least one function')
    signal?.throwIfAborted()
    const entries = await this.fork({ count: attempts.length, timeoutMs })
    const forks = entries.filter((entry) => !(entry instanceof Error)) as this[]
    try {
      const failure = entries.find((entry) => entry instanceof Error)
      if (failure) throw failure
      const running = Promise.all(attempts.map((attempt, index) => outcome(attempt, forks[index]!, index)))
      const outcomes = await orAborted(running, signal)
      const chosen = select(outcomes, keep)
      await chosen.sandbox.promote()
      return chosen
    } catch (error) {
      // Errors are ignored, because the original error is more important.
      await Promise.allSettled(forks.map((fork) => fork.kill()))
      throw error
    }
  }

  /** Returns the sandboxes and snapshots that are connected with this sandbox. */
  lineage(options?: CallOptions): Promise<m.Lineage> {
    return this.#send(calls.lineage(this.sandboxId), options)
  }

  /** Returns the files that differ from the template, sorted by path. */
  diff(options?: DiffOptions): Promise<m.Change[]>
  /**
   * Compares the contents of the files of two snapshots or sandboxes. Returns the files that
   * differ, sorted by path.
   *
   * @param a Snapshot, or id or name of a snapshot or a sandbox.
   * @param b Like `a`. Defaults to this sandbox.
   */
  diff(a: Compared, options?: DiffOptions): Promise<m.Difference[]>
  diff(a: Compared, b: Compared, options?: DiffOptions): Promise<m.Difference[]>
  diff(
    first?: Compared | DiffOptions,
    second?: Compared | DiffOptions,
    third?: DiffOptions
  ): Promise<m.Change[] | m.Difference[]> {
    if (!isCompared(first)) return this.#changes(first)
    const [b, options] = isCompared(second) ? [idOf(second), third] : [this.sandboxId, second]
    return this.#differences(idOf(first), b, options)
  }

  async #differences(a: string, b: string, options: DiffOptions = {}): Promise<m.Difference[]> {
    const limit = options.limit ?? DEFAULT_CHANGES
    const found: m.Difference[] = []
    for (let token: string | undefined; ;) {
      const [page, next] = await this.#send(calls.compare(a, b, limit - found.length, token), options)
      found.push(...page)
      token = next
      if (!token || found.length >= limit) return found.slice(0, limit)
    }
  }

  async #changes(options: DiffOptions = {}): Promise<m.Change[]> {
    const config = this.connectionConfig
    const base = config.getSandboxUrl(this.sandboxId, { sandboxDomain: this.sandboxDomain, envdPort: this.envdPort })
    const headers: Record<string, string> = { 'E2b-Sandbox-Id': this.sandboxId, 'E2b-Sandbox-Port': `${this.envdPort}` }
    if (this.envdAccessToken) headers['X-Access-Token'] = this.envdAccessToken
    const query = `username=root&limit=${options.limit ?? DEFAULT_CHANGES}`
    const signal = config.getSignal(options.requestTimeoutMs, options.signal)
    const response = await fetch(`${base}/changes?${query}`, { headers, signal })
    const text = await response.text()
    if (!response.ok) throw errorOf(response.status, text, response.headers, classes)
    return (JSON.parse(text) as { changes: m.Change[] }).changes
  }

  // ---- Operation
  /** Renames the sandbox. Null removes the name. */
  rename(name: string | null, options?: CallOptions): Promise<void> {
    return this.#send(calls.rename(this.sandboxId, name), options)
  }

  /**
   * Sets the time without use after which the sandbox is paused, counted from now. The next request
   * resumes the sandbox.
   *
   * @param idleTimeoutMs Time in milliseconds, rounded up to seconds. 0 means never.
   */
  setIdleTimeout(idleTimeoutMs: number, options?: CallOptions): Promise<void> {
    return this.#send(calls.setIdleTimeout(this.sandboxId, idleTimeoutMs), options)
  }

  /**
   * Waits until the sandbox is in a state, or can never reach it. Returns the state.
   *
   * @param options `timeoutMs` is the maximum time. Defaults to no limit.
   */
  async wait(state: m.AwaitedState = 'ended', options: { timeoutMs?: number } & CallOptions = {}): Promise<string> {
    const { timeoutMs = Number.POSITIVE_INFINITY, ...rest } = options
    const end = Date.now() + timeoutMs
    for (;;) {
      const left = Math.max(0, Math.ceil((end - Date.now()) / 1000))
      const now = await this.#send(calls.wait(this.sandboxId, state, Math.min(calls.WAIT_SECONDS, left)), rest).catch(
        (error: unknown) => {
          // Calls do not find a killed sandbox.
          if (error instanceof SandboxNotFoundError) return 'killed'
          throw error
        }
      )
      if (now === state || !calls.CHANGING[state].includes(now)) return now
      if (Date.now() >= end) throw new e2b.TimeoutError(`sandbox ${this.sandboxId} is ${now} after ${timeoutMs} ms`)
    }
  }

  /** Stops all processes and runs the start command of the template. */
  async restart(options: { graceMs?: number } & CallOptions = {}): Promise<this> {
    await this.#send(calls.restart(this.sandboxId, options.graceMs), options)
    return this
  }

  /** Returns the present usage of the running sandbox. */
  stats(options?: CallOptions): Promise<m.Stats> {
    return this.#send(calls.stats(this.sandboxId), options)
  }

  /** Returns the newest allowed and rejected connections and DNS queries. */
  connections(options: { limit?: number } & CallOptions = {}): Promise<m.NetworkConnections> {
    return this.#send(calls.connections(this.sandboxId, options.limit), options)
  }

  /** Creates a link to a port that needs no key. `ttl` is in seconds, and defaults to 3600. */
  preview(port: number, options: { ttl?: number } & CallOptions = {}): Promise<m.Preview> {
    return this.#send(calls.preview(this.sandboxId, port, options.ttl), options)
  }

  /** Returns a socket that is connected to a TCP port, also on the loopback interface. */
  port(port: number): Promise<Socket> {
    return openPort(this.#connection(), this.sandboxId, port)
  }

  /** Waits until a program listens on a TCP port. `timeoutMs` defaults to 30,000. */
  async waitForPort(port: number, options: { timeoutMs?: number; signal?: AbortSignal } = {}): Promise<void> {
    const { timeoutMs = 30_000, signal } = options
    const end = Date.now() + timeoutMs
    for (;;) {
      try {
        const socket = await this.port(port)
        socket.destroy()
        return
      } catch (error) {
        const isTemporary = [PortClosedError, UnavailableError, UnreachableError].some((kind) => error instanceof kind)
        if (!isTemporary) throw error
        if (Date.now() >= end) throw new e2b.TimeoutError(`no program listens on port ${port} after ${timeoutMs} ms`)
      }
      await sleep(PORT_POLL_MS, undefined, { signal })
    }
  }

  /** Copies a local file into the sandbox. */
  async upload(source: string, path: string, onProgress?: Progress): Promise<void> {
    const { size } = await stat(source)
    const stream = createReadStream(source).pipe(counted(size, onProgress))
    await this.files.write(path, Readable.toWeb(stream) as unknown as ReadableStream)
  }

  /** Copies a file of the sandbox to a local file. */
  async download(path: string, target: string, onProgress?: Progress): Promise<void> {
    const { size } = await this.files.getInfo(path)
    const stream = await this.files.read(path, { format: 'stream' })
    const source = Readable.fromWeb(stream as unknown as Parameters<typeof Readable.fromWeb>[0])
    await pipeline(source, counted(size, onProgress), createWriteStream(target))
  }

  /** Kills the sandbox at the end of its block (`await using`). */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill()
  }

  #connection(options?: CallOptions): Connection {
    const given = Object.entries(options ?? {}).filter(([, value]) => value !== undefined)
    return { ...this.connectionConfig, ...Object.fromEntries(given) }
  }

  #send<T>(call: Call<T>, options?: CallOptions): Promise<T> {
    return send(this.#connection(options), call)
  }
}

type AnySandbox = typeof e2b.Sandbox

function resolved(kind: AnySandbox, options?: Connection): Connection {
  const { boundOpts } = kind as unknown as { boundOpts?: Connection }
  return withAddress(e2b.ConnectionConfig.mergeOpts(boundOpts, options))
}

function build<S extends AnySandbox>(kind: S, created: m.Created, connection: Connection): InstanceType<S> {
  return new kind({ ...created, ...new e2b.ConnectionConfig(connection) }) as InstanceType<S>
}

async function create<S extends AnySandbox>(
  kind: S,
  template: string | undefined,
  options: SandboxOptions = {}
): Promise<InstanceType<S>> {
  const connection = resolved(kind, options)
  const { defaultTemplate } = kind as unknown as { defaultTemplate: string }
  const { image, onImageLog } = options
  if (template !== undefined && image !== undefined) {
    throw new e2b.InvalidArgumentError('pass either template or image')
  }
  const imported = image === undefined ? undefined : await importImage(connection, image, onImageLog)
  const body = createBody(imported ?? template ?? defaultTemplate, options)
  return build(kind, await send(connection, calls.create(body, options.idempotencyKey)), connection)
}

/** Deletes a snapshot after its files are complete. */
async function discard(snapshot: Snapshot): Promise<void> {
  for (let wasReady = false; ; ) {
    try {
      await snapshot.delete()
      return
    } catch (error) {
      if (wasReady || !(error instanceof InUseError)) throw error
      wasReady = (await snapshot.refresh()).status === 'ready'
    }
    await sleep(DISCARD_POLL_MS)
  }
}

function counted(size: number, onProgress?: Progress): Transform {
  let done = 0
  return new Transform({
    transform(piece: Buffer, _, next) {
      done += piece.length
      onProgress?.(done, size)
      next(null, piece)
    },
  })
}
