import type { QueryClient } from '@tanstack/react-query'
import { useQueryClient } from '@tanstack/react-query'
import { useEffect } from 'react'
import { live, type SandboxEvent } from '../live/socket'
import { api, CallError, data, type Sandbox, type SandboxDetail } from './client'
import { refresh } from './queries'

/** Events within this time are processed together. The first event of a burst is processed at once. */
const WINDOW = 30
/** If more sandboxes have changed, the list is requested instead of each sandbox. */
const MAX_SINGLE = 8
/** Pause between two changes of the list in milliseconds, per 1,000 rows: each change draws the table. */
const ROW_PAUSE = 50
/** Interval at which lists and figures of the host are requested again because of events. */
const LIST_PAUSE = 1000

/** Queries that change with events of a kind, in addition to the sandbox. */
const affected: [prefix: string, keys: string[]][] = [
  ['sandbox.snapshotTaken', ['snapshots', 'lineage']],
  ['sandbox.forked', ['lineage', 'snapshots']],
  ['sandbox.promoted', ['lineage']],
  ['sandbox.rolledBack', ['lineage']],
  ['sandbox.killed', ['lineage', 'snapshots']],
  ['build.', ['templates']],
  ['key.', ['keys']],
]

/** Updates the cached data of the page after events. */
class EventUpdates {
  private pending: SandboxEvent[] = []
  private timer: ReturnType<typeof setTimeout> | undefined
  private flushed = 0
  private readonly requested = new Map<string, number>()
  /** Rows of the list that are changed together. `undefined` removes a row. */
  private readonly rows = new Map<string, Sandbox | undefined>()
  private rowTimer: ReturnType<typeof setTimeout> | undefined
  private changed = 0

  constructor(private readonly queries: QueryClient) {}

  add(events: SandboxEvent[]) {
    this.pending.push(...events)
    if (this.timer) return
    const wait = Math.max(0, this.flushed + WINDOW - performance.now())
    this.timer = setTimeout(() => this.flush(), wait)
  }

  close() {
    clearTimeout(this.timer)
    clearTimeout(this.rowTimer)
  }

  private flush() {
    const events = this.pending
    this.pending = []
    this.timer = undefined
    this.flushed = performance.now()
    const keys = new Set(['events', 'limits', 'host'])
    for (const event of events) {
      for (const [prefix, names] of affected) if (event.type.startsWith(prefix)) names.forEach((key) => keys.add(key))
    }
    const ids = new Set<string>()
    for (const { type, sandboxID } of events) {
      if (!sandboxID) continue
      // The daemon may still find a sandbox at the moment of this event. Ids are not used again.
      if (type === 'sandbox.killed') {
        ids.delete(sandboxID)
        this.setRow(sandboxID, undefined)
        this.queries.setQueryData<SandboxDetail>(['sandbox', sandboxID], (old) => old && { ...old, state: 'killed' })
      } else ids.add(sandboxID)
    }
    const list = this.queries.getQueryData<Sandbox[]>(['sandboxes'])
    if (list && ids.size <= MAX_SINGLE) for (const id of ids) void this.updateSandbox(id)
    else if (ids.size > 0) keys.add('sandboxes').add('sandbox')
    for (const key of keys) this.request(key)
  }

  /** Requests the data of a query again, at most once per [LIST_PAUSE]. */
  private request(key: string) {
    const now = performance.now()
    const at = this.requested.get(key) ?? 0
    // A request is planned already.
    if (at > now) return
    const due = key === 'events' ? now : Math.max(now, at + LIST_PAUSE)
    this.requested.set(key, due)
    setTimeout(() => void this.queries.invalidateQueries({ queryKey: [key] }), due - now)
  }

  /** Requests one sandbox, and changes its row in the list. */
  private async updateSandbox(id: string) {
    let sandbox
    try {
      sandbox = data(await api.GET('/sandboxes/{sandboxID}', { params: { path: { sandboxID: id } } }))!
    } catch (error) {
      // The sandbox was removed. Other errors are reported by the list.
      if (error instanceof CallError && error.status === 404) {
        this.setRow(id, undefined)
        void this.queries.invalidateQueries({ queryKey: ['sandbox', id] })
      } else this.request('sandboxes')
      return
    }
    this.setRow(id, sandbox)
    const key = ['sandbox', id]
    if (this.queries.getQueryData(key)) this.queries.setQueryData(key, sandbox)
  }

  private setRow(id: string, sandbox: Sandbox | undefined) {
    this.rows.set(id, sandbox)
    if (this.rowTimer) return
    const count = this.queries.getQueryData<Sandbox[]>(['sandboxes'])?.length ?? 0
    const due = this.changed + (count * ROW_PAUSE) / 1000
    this.rowTimer = setTimeout(() => this.setRows(), Math.max(0, due - performance.now()))
  }

  private setRows() {
    this.rowTimer = undefined
    this.changed = performance.now()
    const rows = new Map(this.rows)
    this.rows.clear()
    this.queries.setQueryData<Sandbox[]>(['sandboxes'], (list) => {
      if (!list) return list
      const changed: Sandbox[] = []
      for (const old of list) {
        const row = rows.has(old.sandboxID) ? rows.get(old.sandboxID) : old
        rows.delete(old.sandboxID)
        if (row) changed.push(row)
      }
      return [...[...rows.values()].filter((row) => row !== undefined).reverse(), ...changed]
    })
    // A list that is being loaded may be older than this row.
    if (this.queries.isFetching({ queryKey: ['sandboxes'] }) > 0) this.request('sandboxes')
  }
}

/** Updates the page after events while it is visible. */
export function useLiveEvents() {
  const queries = useQueryClient()
  useEffect(() => {
    const updates = new EventUpdates(queries)
    let isStale = false
    const all = () => {
      refresh(queries)
      for (const key of ['events', 'lineage', 'templates', 'keys']) void queries.invalidateQueries({ queryKey: [key] })
    }
    const end = live.follow((events) => {
      // Hidden pages request nothing.
      if (document.hidden) isStale = true
      else if (events) updates.add(events)
      else all()
    })
    const onVisible = () => {
      if (document.hidden || !isStale) return
      isStale = false
      all()
    }
    document.addEventListener('visibilitychange', onVisible)
    return () => {
      end()
      updates.close()
      document.removeEventListener('visibilitychange', onVisible)
    }
  }, [queries])
}
