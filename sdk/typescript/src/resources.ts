// Classes of snapshots, functions and the host.
import { readFile } from 'node:fs/promises'
import path from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { InvalidArgumentError, TimeoutError } from 'e2b'
import * as calls from './calls.js'
import { type Connection, withAddress } from './connection.js'
import { UnreachableError } from './errors.js'
import type * as m from './models.js'
import { type Call, send } from './transport.js'

/** A snapshot of a sandbox. */
export interface Snapshot extends m.SnapshotDetails {}

export class Snapshot {
  readonly #connection: Connection

  /** @hidden */
  constructor(info: m.SnapshotDetails, connection: Connection = {}) {
    Object.assign(this, info)
    this.#connection = connection
  }

  /** Returns a snapshot by id or name. */
  static async get(snapshot: string, connection: Connection = {}): Promise<Snapshot> {
    return new Snapshot(await send(withAddress(connection), calls.getSnapshot(snapshot)), connection)
  }

  /** Iterates over snapshots, newest first. */
  static async *list(filter: { sandboxId?: string; name?: string } & Connection = {}): AsyncGenerator<Snapshot> {
    const { sandboxId, name, ...connection } = filter
    let token: string | undefined
    do {
      const [page, next] = await send(withAddress(connection), calls.listSnapshots(sandboxId, name, token))
      for (const info of page) yield new Snapshot(info, connection)
      token = next
    } while (token)
  }

  /** Returns the present state of the snapshot. */
  refresh(): Promise<Snapshot> {
    return Snapshot.get(this.snapshotId, this.#connection)
  }

  /** Deletes the snapshot. Returns false if it does not exist. */
  delete(): Promise<boolean> {
    return send(withAddress(this.#connection), calls.deleteSnapshot(this.snapshotId))
  }

  /** Compares the snapshot and its ancestors with their checksums. */
  verify(): Promise<m.Json[]> {
    return send(withAddress(this.#connection), calls.verifySnapshot(this.snapshotId))
  }
}

/** A WebAssembly function. */
export class Function {
  readonly name: string
  readonly version: number
  readonly state: 'enabled' | 'disabled'
  readonly public: boolean
  /** Path for requests at the address of the daemon. */
  readonly path: string
  readonly url?: string
  readonly digest: string | null
  /** Complete response of the API. */
  readonly data: m.Json
  readonly #connection: Connection

  /** @hidden */
  constructor(data: m.Json, connection: Connection) {
    this.name = data.name
    this.version = data.version
    this.state = data.state
    this.public = data.public
    this.path = data.path
    this.url = data.url
    this.digest = data.digest
    this.data = data
    this.#connection = connection
  }

  /**
   * Deploys a module as a new version.
   *
   * @param module Path of a WebAssembly module, or its bytes.
   * @param options `name` defaults to the name of the file. `settings` has the fields of
   *   `DeploySettings` in the API, for example `{ public: true }`.
   */
  static async deploy(
    module: string | Uint8Array,
    options: { name?: string; settings?: m.Json } & Connection = {}
  ): Promise<Function> {
    const { name, settings, ...connection } = options
    const isPath = typeof module === 'string'
    const target = name ?? (isPath ? path.parse(module).name : undefined)
    if (target === undefined) throw new InvalidArgumentError('a module without a path requires a name')
    const content = isPath ? await readFile(module) : module
    return new Function(await send(withAddress(connection), calls.deploy(target, content, settings ?? {})), connection)
  }

  /** Returns a function. */
  static async get(name: string, connection: Connection = {}): Promise<Function> {
    return new Function(await send(withAddress(connection), calls.getFunction(name)), connection)
  }

  /** Returns the functions of the key. */
  static async list(connection: Connection = {}): Promise<Function[]> {
    const all = await send(withAddress(connection), calls.listFunctions())
    return all.map((data) => new Function(data, connection))
  }

  /** Sends a request to the function. Its response is returned also if its status is an error. */
  call(path = '/', options: calls.InvokeOptions = {}): Promise<m.FunctionResponse> {
    return this.#send(calls.invoke(this.name, path, options))
  }

  /**
   * Returns a page of the log.
   *
   * @param options `after` is `next` of the previous page, `wait` the maximum time in seconds to
   *   wait for the first entry.
   */
  logs(options: { after?: string; wait?: number } = {}): Promise<m.FunctionLog> {
    return this.#send(calls.functionLog(this.name, options.after, options.wait))
  }

  /** Activates an earlier version. Defaults to the previous one. */
  async rollback(version?: number): Promise<Function> {
    return new Function(await this.#send(calls.switchFunction(this.name, 'rollback', version)), this.#connection)
  }

  /** Enables the function. */
  async enable(): Promise<Function> {
    return new Function(await this.#send(calls.switchFunction(this.name, 'enable')), this.#connection)
  }

  /** Rejects requests until the function is enabled. */
  async disable(): Promise<Function> {
    return new Function(await this.#send(calls.switchFunction(this.name, 'disable')), this.#connection)
  }

  /** Removes the function with all versions. Returns false if it does not exist. */
  remove(): Promise<boolean> {
    return this.#send(calls.removeFunction(this.name))
  }

  #send<T>(call: Call<T>): Promise<T> {
    return send(withAddress(this.#connection), call)
  }
}

/** Delay before an iterator of events resumes after a lost connection. */
const RESUME_MS = 500

async function* iterateEvents(options: m.EventOptions & Connection = {}): AsyncGenerator<m.SandboxEvent> {
  const { sandboxId, types, since, follow, after, ...connection } = options
  const selection = { sandboxId, types, since, follow }
  let position = after
  for (;;) {
    let page: m.EventPage
    try {
      page = await send(withAddress(connection), calls.events(selection, position))
    } catch (error) {
      const isLost = error instanceof UnreachableError || error instanceof TimeoutError
      if (!isLost || follow === false || position === undefined) throw error
      await sleep(RESUME_MS, undefined, { signal: connection.signal })
      continue
    }
    yield* page.events
    position = page.next ?? position
    if (!page.more && follow === false) return
  }
}

/** The daemon and its host. */
export const Host = {
  /**
   * Iterates over events, oldest first. Resumes after a lost connection and a restart of the daemon.
   */
  events: (options: m.EventOptions & Connection = {}): AsyncGenerator<m.SandboxEvent> => iterateEvents(options),
  /** Returns status and free resources. */
  status: (connection: Connection = {}): Promise<m.HostStatus> => send(withAddress(connection), calls.host()),
  /** Returns the engines and their capabilities. */
  engines: (connection: Connection = {}): Promise<m.Engine[]> => send(withAddress(connection), calls.engines()),
  /** Returns the warm pools. */
  pools: (connection: Connection = {}): Promise<m.Pool[]> => send(withAddress(connection), calls.pools()),
  /** Sets the size of a template's warm pool. */
  setPool: (template: string, size: number, connection: Connection = {}): Promise<m.Pool> =>
    send(withAddress(connection), calls.setPool(template, size)),
  /** Returns limits and usage of a key. Defaults to the key of the request. */
  limits: (options: { key?: string } & Connection = {}): Promise<m.Limits> => {
    const { key, ...connection } = options
    return send(withAddress(connection), calls.limits(key))
  },
}
