// Volumes.
import * as e2b from 'e2b'
import * as calls from './calls.js'
import { type Connection, withAddress } from './connection.js'
import type { VolumeSnapshot } from './models.js'
import { send } from './transport.js'

// Addresses of the files of volumes.
const addresses = new WeakMap<e2b.Volume, string>()
// Connection options of volumes.
const connections = new WeakMap<e2b.Volume, Connection>()

/** Selects the daemon of a volume. For its files, `E2B_VOLUME_API_URL` has precedence. */
function select(volume: e2b.Volume, connection: Connection) {
  connections.set(volume, connection)
  const url = process.env.E2B_VOLUME_API_URL || connection.apiUrl
  if (url) addresses.set(volume, url)
}

/** Adds the address of the daemon to the options of a call, unless they have one. */
function located<T extends e2b.VolumeApiOpts>(volume: e2b.Volume, options: T | undefined): T | undefined {
  const apiUrl = addresses.get(volume)
  if (!apiUrl || options?.apiUrl || options?.domain || options?.debug) return options
  return { ...options, apiUrl } as T
}

/** Volumes: `Volume` of `e2b`, whose calls find the daemon as `Sandbox` does. */
export class Volume extends e2b.Volume {
  protected static override resolveOpts<T extends Connection>(options?: T): T | undefined {
    return withAddress(super.resolveOpts(options))
  }

  /** Creates a volume. */
  static override async create<V extends typeof e2b.Volume>(this: V, name: string, options?: Connection) {
    const connection = withAddress(options)
    const volume = await e2b.Volume.create.call(this, name, connection)
    select(volume, connection)
    return volume as InstanceType<V>
  }

  /** Returns a volume by id or name. */
  static override async connect<V extends typeof e2b.Volume>(this: V, volumeId: string, options?: Connection) {
    const connection = withAddress(options)
    const volume = await e2b.Volume.connect.call(this, volumeId, connection)
    select(volume, connection)
    return volume as InstanceType<V>
  }

  /** Stores a snapshot of the volume. Requires a daemon with a store. */
  snapshot(options?: Connection): Promise<VolumeSnapshot> {
    const connection = withAddress({ ...connections.get(this), ...options })
    return send(connection, calls.snapshotVolume(this.volumeId))
  }

  /** Returns the snapshots of all volumes of the key, also of removed volumes. */
  static async snapshots(options?: Connection): Promise<VolumeSnapshot[]> {
    const connection = withAddress(options)
    const found: VolumeSnapshot[] = []
    let token: string | undefined
    do {
      const [page, next] = await send(connection, calls.listVolumeSnapshots(token))
      found.push(...page)
      token = next
    } while (token)
    return found
  }

  /**
   * Creates a volume with the files of a snapshot.
   *
   * @param snapshot Snapshot, or its id.
   * @param name Name of the new volume.
   */
  static async restore(snapshot: string | VolumeSnapshot, name: string, options?: Connection): Promise<Volume> {
    const volumeId = await send(withAddress(options), calls.restoreVolume(snapshot, name))
    return Volume.connect(volumeId, options)
  }

  /**
   * Deletes a snapshot. Returns false if it does not exist.
   *
   * @param snapshot Snapshot, or its id.
   */
  static deleteSnapshot(snapshot: string | VolumeSnapshot, options?: Connection): Promise<boolean> {
    return send(withAddress(options), calls.deleteVolumeSnapshot(snapshot))
  }
}

// Methods that access files, with the number of parameters before the options.
const METHODS = { list: 1, makeDir: 1, getInfo: 1, updateMetadata: 2, readFile: 1, writeFile: 2, remove: 1 } as const

for (const [name, index] of Object.entries(METHODS)) {
  const method = Reflect.get(e2b.Volume.prototype, name) as (...parameters: unknown[]) => unknown
  const value = function (this: e2b.Volume, ...parameters: unknown[]) {
    parameters[index] = located(this, parameters[index] as e2b.VolumeApiOpts | undefined)
    return method.apply(this, parameters)
  }
  Object.defineProperty(Volume.prototype, name, { value, writable: true, configurable: true })
}
