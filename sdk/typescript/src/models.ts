// Results of calls.
import type { SandboxMetrics, SnapshotInfo as E2bSnapshotInfo } from 'e2b'

export type BootMode = 'cold' | 'snapshot' | 'warm-pool' | 'fork'
export type AwaitedState = 'ended' | 'running' | 'paused'
export type EngineName = 'microvm' | 'gvisor'
export type Ack = 'captured' | 'stored'
export type Json = Record<string, any>

/** Origin of a sandbox's guest. */
export interface Origin {
  templateId: string
  bootMode?: BootMode
  /** Time from the request to the response of the agent, in milliseconds. */
  bootMs?: number
  engine?: EngineName
  name?: string
  forkedFrom?: string
  /** Latest snapshot that the sandbox descends from. */
  snapshotId?: string
}

/** Response to a request that creates a sandbox or connects to it. */
export interface Created {
  sandboxId: string
  sandboxDomain: string | undefined
  envdVersion: string
  envdAccessToken: string | undefined
  trafficAccessToken: string | undefined
  origin: Origin
}

export function created(data: Json): Created {
  return {
    sandboxId: data.sandboxID,
    sandboxDomain: data.domain ?? undefined,
    envdVersion: data.envdVersion,
    envdAccessToken: data.envdAccessToken,
    trafficAccessToken: data.trafficAccessToken ?? undefined,
    origin: {
      templateId: data.templateID,
      bootMode: data.bootMode,
      bootMs: data.bootMs,
      engine: data.engine,
      name: data.name,
      forkedFrom: data.forkedFrom,
      snapshotId: data.snapshotID,
    },
  }
}

/** A snapshot. */
export interface SnapshotDetails extends E2bSnapshotInfo {
  /** `storing`: captured in memory and not yet complete on disk. */
  status: 'storing' | 'ready'
  /** Sandbox from which the snapshot was taken. */
  sandboxId?: string
  parentId?: string
  templateId: string
  createdAt: Date
  /** Time for which the guest was stopped, in milliseconds. */
  stoppedMs: number
  /** Time from the request to completion in milliseconds. 0 until the snapshot is complete. */
  totalMs: number
  /** Disk space of the snapshot in bytes, without its ancestors. */
  bytes: number
  /** State in the store. Absent without a store. */
  storeState?: 'local' | 'uploading' | 'stored'
}

export function snapshotInfo(data: Json): SnapshotDetails {
  return {
    snapshotId: data.snapshotID,
    names: data.names,
    status: data.status,
    sandboxId: data.originSandboxID,
    parentId: data.parentSnapshotID,
    templateId: data.templateID,
    createdAt: new Date(data.createdAt),
    stoppedMs: data.stoppedMs,
    totalMs: data.totalMs,
    bytes: data.jiffy.bytes,
    storeState: data.storeState,
  }
}

/** Snapshot of a volume in the store of the daemon. */
export interface VolumeSnapshot {
  snapshotId: string
  /** Volume, which may have been removed. */
  volumeId: string
  /** Name of the volume at the time of the snapshot. */
  name: string
  sizeMB: number
  maxFiles: number
  usedBytes: number
  createdAt: Date
}

export function volumeSnapshot(data: Json): VolumeSnapshot {
  return {
    snapshotId: data.volumeSnapshotID,
    volumeId: data.volumeID,
    name: data.name,
    sizeMB: data.sizeMB,
    maxFiles: data.maxFiles,
    usedBytes: data.usedBytes,
    createdAt: new Date(data.createdAt),
  }
}

/** File that differs from the template. */
export interface Change {
  /** `A`: added, `C`: changed, `D`: deleted. */
  kind: 'A' | 'C' | 'D'
  path: string
}

/** File that differs between two sandboxes or snapshots. */
export interface Difference {
  kind: 'added' | 'changed' | 'removed'
  path: string
  /** Size in the first object in bytes. Absent for an added file. */
  sizeBefore?: number
  /** Size in the second object in bytes. Absent for a removed file. */
  size?: number
  /** False if the contents have the same size and could not be compared. */
  verified: boolean
}

export function difference(data: Json): Difference {
  return {
    kind: data.kind,
    path: data.path,
    sizeBefore: data.a?.size,
    size: data.b?.size,
    verified: data.verified,
  }
}

/** Sandbox or snapshot of a lineage. */
export interface LineageNode {
  /** Id. For several consecutive snapshots: id of the newest one. */
  id: string
  kind: 'sandbox' | 'snapshot'
  state: 'creating' | 'running' | 'paused' | 'broken' | 'storing' | 'ready' | 'removed'
  name?: string
  createdAt?: Date
  /** Purpose of a snapshot: `asked`, `fork` or `pause`. */
  purpose?: string
  /** Sandbox of which the snapshot was taken. */
  sandboxId?: string
  /** Nearest ancestor of the snapshot. */
  parentId?: string
  /** Disk space of a snapshot in bytes, without its ancestors. */
  bytes?: number
  /** Number of snapshots that the node represents. */
  count: number
}

/** Relation between a sandbox and a snapshot. */
export interface LineageEdge {
  /** Id of the node that has the relation. */
  from: string
  /** Id of the related node. */
  to: string
  relation: 'snapshot_of' | 'started_from' | 'rolled_back_to'
  at?: Date
}

/** Sandboxes and snapshots that are connected with a sandbox. */
export interface Lineage {
  nodes: LineageNode[]
  edges: LineageEdge[]
  /** True if the lineage has more than 5,000 nodes, of which the nearest ones are listed. */
  truncated: boolean
}

export function lineage(data: Json): Lineage {
  const time = (text?: string) => (text ? new Date(text) : undefined)
  return {
    nodes: data.nodes.map((node: Json) => ({
      id: node.id,
      kind: node.kind,
      state: node.state,
      name: node.name,
      createdAt: time(node.createdAt),
      purpose: node.purpose,
      sandboxId: node.sandboxID,
      parentId: node.parentSnapshotID,
      bytes: node.bytes,
      count: node.count,
    })),
    edges: data.edges.map((edge: Json) => ({ ...edge, at: time(edge.at) })),
    truncated: data.truncated,
  }
}

/** Connection of a sandbox, or a DNS query. */
export interface NetworkConnection {
  timestamp: Date
  protocol: string
  address: string | null
  port: number | null
  /** Queried name, or the name that the connection sent. */
  host: string | null
  question: string | null
  bytesOut: number | null
  bytesIn: number | null
  verdict: 'allowed' | 'refused'
  reason: string | null
  times: number
}

/** Newest connections of a sandbox, oldest first. */
export interface NetworkConnections {
  connections: NetworkConnection[]
  /** Time at which recording started. Absent if the sandbox has no network. */
  since?: Date
  /** Number of further connections, as far as known. */
  missing: number
  /** Information that the host's kernel does not provide. */
  untold: string[]
}

/** Link to a port of a sandbox. Requests need no key. */
export interface Preview {
  url: string
  expiresAt: Date
}

/** Present usage of a sandbox. */
export interface Stats extends SandboxMetrics {
  /** Bytes received since the guest started. Absent without a network. */
  netBytesIn?: number
  netBytesOut?: number
}

export function stats(data: Json): Stats {
  return {
    timestamp: new Date(data.timestamp),
    cpuUsedPct: data.cpuUsedPct,
    cpuCount: data.cpuCount,
    memUsed: data.memUsed,
    memTotal: data.memTotal,
    memCache: data.memCache,
    diskUsed: data.diskUsed,
    diskTotal: data.diskTotal,
    netBytesIn: data.netBytesIn,
    netBytesOut: data.netBytesOut,
  }
}

/** Result of one function of `tryEach`. */
export interface Outcome<S, T> {
  /** Position of the function. */
  index: number
  /** Fork in which the function ran. */
  sandbox: S
  result?: T
  /** Present if the function failed. */
  error?: Error
}

/** An engine that isolates sandboxes. */
export interface Engine {
  name: EngineName
  usable: boolean
  default: boolean
  version: string | null
  /** Reason why the engine does not work. Only the host's owner receives it. */
  why: string | null
  capabilities: Record<string, boolean>
}

/** A warm pool: guests of a template that are ready to become sandboxes. */
export interface Pool {
  templateID: string
  size: number
  ready: number
}

/** Limits and usage of an API key. */
export interface Limits {
  keyID: string
  name: string
  limits: Record<string, number | null>
  used: Record<string, any>
}

/** Status and free resources of a daemon. */
export interface HostStatus {
  version: string
  /** Number of running sandboxes. */
  running: number
  /** Number of guests in warm pools. */
  warm: number
  network: string
  memoryTotalMB: number | null
  memoryAvailableMB: number | null
  diskTotalMB: number | null
  diskFreeMB: number | null
}

/** Event of a sandbox, a build or a key. */
export interface SandboxEvent {
  /** Position for `after`. Absent for `gap`. */
  id?: string
  /** Type, for example `sandbox.killed`. `gap`: earlier events are no longer retained. */
  type: string
  /** Time of the event, or of the newest missing event. */
  time: Date
  sandboxId?: string
  cause?: string
  /** Complete event of the API. */
  data: Json
}

/** Page of events. */
export interface EventPage {
  events: SandboxEvent[]
  /** Position after the page. */
  next?: string
  /** True if the log continues. */
  more: boolean
}

/** Selection of events. */
export interface EventOptions {
  /** Only events of this sandbox, by its id. */
  sandboxId?: string
  /** Only events of these types, for example `['sandbox.killed']`. */
  types?: string[]
  /** Only events after this `id`: continues an earlier iteration. */
  after?: string
  /** Only events from this time on. */
  since?: Date
  /** Wait for further events. If false, the iteration ends with the newest event. Defaults to true. */
  follow?: boolean
}

/** Entry of a function's log. */
export interface FunctionLogEntry {
  timestamp: Date
  requestId: string
  sequence: number
  stream: string
  text: string
}

/** Page of a function's log. */
export interface FunctionLog {
  entries: FunctionLogEntry[]
  /** Position after the last entry: the next value of `after`. */
  next: string
}

/** Response of a function. */
export interface FunctionResponse {
  status: number
  headers: Headers
  body: Uint8Array
  text(): string
}
