import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { api, data, type Schemas } from './client'
import { pollInterval } from './queries'

export type SandboxEvent = Schemas['Event']

const MINUTE = 60_000
const HOUR = 60 * MINUTE
/** Number of events of a page. */
const PAGE = 100

/** Newest events of a sandbox, or of the last hour. */
export const useEvents = (sandboxID?: string) =>
  useQuery({
    queryKey: ['events', sandboxID ?? ''],
    queryFn: async ({ signal }) => {
      const since = new Date(Math.floor((Date.now() - HOUR) / MINUTE) * MINUTE).toISOString()
      const selection = sandboxID ? { sandboxID } : { since }
      const query = { ...selection, order: 'desc' as const, limit: PAGE }
      return data(await api.GET('/events', { params: { query }, signal }))!
    },
    refetchInterval: pollInterval,
    placeholderData: keepPreviousData,
  })
