import type { Schemas } from '../api/client'

/** Usage of a key on one or several days. */
export type UsageTotal = Schemas['DailyUsage']

/** Adds the usage of two days or keys. The maximum of the disk space is the larger one. */
export function addUsage(a: UsageTotal, b: UsageTotal): UsageTotal {
  return {
    ...a,
    sandboxSeconds: a.sandboxSeconds + b.sandboxSeconds,
    cpuSeconds: a.cpuSeconds + b.cpuSeconds,
    memoryGibSeconds: a.memoryGibSeconds + b.memoryGibSeconds,
    storedGibSeconds: a.storedGibSeconds + b.storedGibSeconds,
    storedBytes: Math.max(a.storedBytes, b.storedBytes),
    sentBytes: a.sentBytes + b.sentBytes,
    functionRequests: a.functionRequests + b.functionRequests,
  }
}

/** Adds the usage of each key. The key with the longest time of sandboxes is the first. */
export function usageByKey(entries: UsageTotal[]): UsageTotal[] {
  const sums = new Map<string, UsageTotal>()
  for (const entry of entries) {
    const key = entry.keyID ?? ''
    const sum = sums.get(key)
    sums.set(key, sum ? addUsage(sum, entry) : entry)
  }
  return [...sums.values()].sort((a, b) => b.sandboxSeconds - a.sandboxSeconds)
}

/** Returns the usage of a key by day, newest first. `owner` is the host's owner. */
export function usageByDay(entries: UsageTotal[], key: string): UsageTotal[] {
  return entries.filter((entry) => (entry.keyID ?? 'owner') === key).reverse()
}
