import {
  keepPreviousData,
  type QueryClient,
  replaceEqualDeep,
  useInfiniteQuery,
  useQuery,
  useQueryClient,
} from '@tanstack/react-query'
import { useEffect, useState, useSyncExternalStore } from 'react'
import { api, CallError, data, type Sandbox, type Snapshot } from './client'
import { live, type Usage, useLiveUsage } from '../live/socket'

/** Interval of lists while the page is visible and receives no events. */
const LIST_INTERVAL = 2000
/** Interval of lists that events change. Some changes, such as a remaining time, cause no event. */
const LIVE_INTERVAL = 10_000
/** Number of items in a page of the API. */
const PAGE = 100
/** States that the table shows. */
const STATES = 'running,paused,broken,creating'

/** Returns the items of all pages of a list. */
async function pages<T>(load: (nextToken?: string) => Promise<{ data?: T[]; response: Response }>): Promise<T[]> {
  const all: T[] = []
  let nextToken: string | undefined
  do {
    const page = await load(nextToken)
    all.push(...data(page))
    nextToken = page.response.headers.get('x-next-token') ?? undefined
  } while (nextToken)
  return all
}

/**
 * Returns all sandboxes that the caller sees. Unchanged sandboxes remain the objects of the `former`
 * list. They are compared page by page: a comparison of a long list would block the page.
 */
const listSandboxes = (signal: AbortSignal, former: Sandbox[] = []) => {
  const known = new Map(former.map((sandbox) => [sandbox.sandboxID, sandbox]))
  return pages<Sandbox>(async (nextToken) => {
    const query = { state: STATES, limit: PAGE, nextToken }
    const page = await api.GET('/v2/sandboxes', { params: { query: query as never }, signal })
    const data = page.data?.map((sandbox) => replaceEqualDeep(known.get(sandbox.sandboxID), sandbox))
    return { ...page, data }
  })
}

const listSnapshots = (signal: AbortSignal, all: boolean) =>
  pages<Snapshot>((nextToken) => {
    const query = { all, limit: PAGE, nextToken }
    return api.GET('/snapshots', { params: { query: query as never }, signal })
  })

/** Duration of the latest request for a list. Lists that take longer are requested less often. */
let listTime = 0

export const pollInterval = () => (live.isConnected ? LIVE_INTERVAL : LIST_INTERVAL)
const polled = () => Math.max(pollInterval(), listTime * 20)

async function timed<T>(request: () => Promise<T>): Promise<T> {
  const start = performance.now()
  const result = await request()
  listTime = performance.now() - start
  return result
}

export const useSandboxes = () => {
  const queries = useQueryClient()
  return useQuery({
    queryKey: ['sandboxes'],
    queryFn: ({ signal }) => timed(() => listSandboxes(signal, queries.getQueryData(['sandboxes']))),
    refetchInterval: polled,
    structuralSharing: false,
  })
}

export const useSnapshots = (all = true) =>
  useQuery({
    queryKey: ['snapshots', all],
    queryFn: ({ signal }) => listSnapshots(signal, all),
    refetchInterval: () => polled() * 2,
  })

/** Object whose lineage is shown: a sandbox, or a snapshot. */
export type LineageOf = { sandboxID: string } | { snapshotID: string }

/** `unfold` are snapshots whose series of automatic snapshots are shown one by one. */
export const useLineage = (of: LineageOf | undefined, unfold: string[] = []) =>
  useQuery({
    queryKey: ['lineage', of, unfold.join(',')],
    queryFn: async ({ signal }) => {
      const query = { ...of, unfold: unfold.join(',') || undefined }
      return data(await api.GET('/lineage', { params: { query }, signal }))!
    },
    enabled: of !== undefined,
    refetchInterval: polled,
    placeholderData: keepPreviousData,
  })

/** Differences of two sandboxes or snapshots, in pages. Both are compared once per visit of the page. */
export const useComparison = (a: string, b: string) =>
  useInfiniteQuery({
    queryKey: ['compare', a, b],
    queryFn: async ({ signal, pageParam }) => {
      const query = { a, b, nextToken: pageParam }
      const page = await api.GET('/compare', { params: { query }, signal })
      return { ...data(page)!, next: page.response.headers.get('x-next-token') ?? undefined }
    },
    initialPageParam: undefined as string | undefined,
    getNextPageParam: (page) => page.next,
    staleTime: Number.POSITIVE_INFINITY,
    gcTime: 0,
    retry: false,
  })

/** Both contents of a file. */
export const useComparedFile = (a: string, b: string, path: string) =>
  useQuery({
    queryKey: ['compare', a, b, path],
    queryFn: async ({ signal }) => data(await api.GET('/compare', { params: { query: { a, b, path } }, signal }))!,
    staleTime: Number.POSITIVE_INFINITY,
    gcTime: 0,
    retry: false,
  })

export const useSandbox = (id: string, enabled = true) =>
  useQuery({
    enabled,
    queryKey: ['sandbox', id],
    queryFn: async ({ signal }) =>
      data(await api.GET('/sandboxes/{sandboxID}', { params: { path: { sandboxID: id } }, signal }))!,
    refetchInterval: pollInterval,
    placeholderData: keepPreviousData,
  })

export const useTemplates = () =>
  useQuery({
    queryKey: ['templates'],
    queryFn: async ({ signal }) => data(await api.GET('/templates', { signal }))!,
    staleTime: 10_000,
  })

/** Recipes of the stock templates of the host. */
export const useRecipes = (enabled: boolean) =>
  useQuery({
    queryKey: ['recipes'],
    queryFn: async ({ signal }) => data(await api.GET('/recipes', { signal }))!,
    enabled,
  })

export const useHost = (enabled = true) =>
  useQuery({
    queryKey: ['host'],
    queryFn: async ({ signal }) => data(await api.GET('/host', { signal }))!,
    refetchInterval: 5000,
    enabled,
  })

export const useLimits = () =>
  useQuery({
    queryKey: ['limits'],
    queryFn: async ({ signal }) => data(await api.GET('/limits', { signal }))!,
    refetchInterval: 5000,
  })

export const useEngines = () =>
  useQuery({
    queryKey: ['engines'],
    queryFn: async ({ signal }) => data(await api.GET('/engines', { signal }))!,
    staleTime: 60_000,
  })

/** The fleet. The query fails with status 404 on a host without a fleet. */
export const useFleet = (enabled: boolean) =>
  useQuery({
    queryKey: ['fleet'],
    queryFn: async ({ signal }) => data(await api.GET('/fleet', { signal }))!,
    enabled,
    refetchInterval: (query) =>
      query.state.error instanceof CallError && query.state.error.status === 404 ? false : 5000,
    retryOnMount: false,
  })

/** Pause after a change of the displayed sandboxes before their usage is requested. */
const SCROLL_PAUSE = 150

/** Returns the ids once they have not changed for a moment: while a table is scrolled they change often. */
function useSettled(ids: string[]): string[] {
  const [settled, setSettled] = useState(ids)
  const key = ids.join(',')
  useEffect(() => {
    const timer = setTimeout(() => setSettled(ids), SCROLL_PAUSE)
    return () => clearTimeout(timer)
  }, [key])
  return settled
}

/** Latest usage of the displayed sandboxes. It changes every second, or every ten on other hosts. */
export function useFigures(displayed: string[]): Usage {
  const ids = useSettled(displayed)
  const sampled = useQuery({
    queryKey: ['figures', ids.join(',')],
    queryFn: async ({ signal }) => {
      const query = { sandbox_ids: ids.slice(0, PAGE).join(',') }
      return data(await api.GET('/sandboxes/metrics', { params: { query: query as never }, signal }))!.sandboxes
    },
    refetchInterval: () => (live.isConnected ? LIVE_INTERVAL : 5000),
    enabled: ids.length > 0,
    placeholderData: keepPreviousData,
  })
  useEffect(() => live.display(ids), [ids.join(',')])
  useEffect(() => () => live.display([]), [])
  return { ...sampled.data, ...useLiveUsage() }
}

/** Requests new lists, after an action or an event. */
export function refresh(queries: QueryClient) {
  for (const key of ['sandboxes', 'snapshots', 'sandbox', 'limits', 'host']) {
    void queries.invalidateQueries({ queryKey: [key] })
  }
}

export function useRefresh() {
  const queries = useQueryClient()
  return () => refresh(queries)
}

let now = Date.now()
let clock: ReturnType<typeof setInterval> | undefined
const clockWatchers = new Set<() => void>()

function watchClock(watcher: () => void) {
  clockWatchers.add(watcher)
  if (clock === undefined) {
    now = Date.now()
    clock = setInterval(() => {
      now = Date.now()
      for (const watcher of clockWatchers) watcher()
    }, 1000)
  }
  return () => {
    clockWatchers.delete(watcher)
    if (clockWatchers.size > 0) return
    clearInterval(clock)
    clock = undefined
  }
}

function currentTime(): number {
  // Without a watcher, the clock does not run.
  if (clock === undefined && Date.now() - now >= 1000) now = Date.now()
  return now
}

/** The current time, which changes every second. All components share one clock. */
export const useNow = (): number => useSyncExternalStore(watchClock, currentTime)
