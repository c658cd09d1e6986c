const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB']

/** Formats a number of bytes with three significant digits. */
export function bytes(count: number | null | undefined): string {
  if (count == null) return '–'
  let value = count
  let unit = 0
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024
    unit++
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2
  return `${Number(value.toFixed(digits))} ${UNITS[unit]}`
}

/** Formats a used and a total number of bytes, in one unit if possible. */
export function bytesOf(used: number, total: number): string {
  const [value, unit] = bytes(used).split(' ')
  const whole = bytes(total)
  return whole.endsWith(` ${unit}`) ? `${value} / ${whole}` : `${value} ${unit} / ${whole}`
}

export const mib = (count: number | null | undefined) => (count == null ? '–' : bytes(count * 1024 * 1024))

/** Formats a duration in seconds with its two largest units. */
export function duration(seconds: number): string {
  const s = Math.max(0, Math.round(seconds))
  if (s < 60) return `${s} s`
  const m = Math.floor(s / 60)
  if (m < 60) return m < 10 && s % 60 ? `${m} min ${s % 60} s` : `${m} min`
  const h = Math.floor(m / 60)
  if (h < 48) return m % 60 ? `${h} h ${m % 60} min` : `${h} h`
  return `${Math.floor(h / 24)} d${h % 24 ? ` ${h % 24} h` : ''}`
}

/** Formats remaining time as a count-down: `4:09`, `1:02:05`. */
export function countDown(seconds: number): string {
  const s = Math.max(0, Math.ceil(seconds))
  if (s >= 48 * 3600) return duration(s)
  const two = (n: number) => String(n).padStart(2, '0')
  const h = Math.floor(s / 3600)
  const minutes = Math.floor((s % 3600) / 60)
  return h ? `${h}:${two(minutes)}:${two(s % 60)}` : `${minutes}:${two(s % 60)}`
}

const local = new Intl.DateTimeFormat(undefined, {
  year: 'numeric',
  month: 'short',
  day: '2-digit',
  hour: '2-digit',
  minute: '2-digit',
  second: '2-digit',
  hour12: false,
})

/** Formats a time in the local time zone. */
export function localTime(ms: number): string {
  return local.format(ms)
}

/** Formats a time in UTC, for titles of local times. */
export function utcTime(ms: number): string {
  return `${new Date(ms).toISOString().replace('T', ' ').slice(0, 19)} UTC`
}

export function count(n: number, one: string, many = `${one}s`): string {
  return `${n.toLocaleString()} ${n === 1 ? one : many}`
}

/** The deadline that stands for no timeout: the end of the year 2999. */
const NEVER = Date.UTC(2999, 0, 1)

/** Returns a deadline in milliseconds since 1970. `null` if it stands for no timeout. */
export function deadlineOf(deadline: number | null | undefined): number | null {
  return deadline == null || deadline >= NEVER ? null : deadline
}

/** Returns the remaining seconds until a deadline. `null` without a deadline. */
export function remaining(deadline: number | null | undefined, now: number): number | null {
  const at = deadlineOf(deadline)
  return at === null ? null : Math.max(0, (at - now) / 1000)
}
