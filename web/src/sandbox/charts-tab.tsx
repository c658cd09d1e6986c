import { useMemo } from 'react'
import { useParams } from '@tanstack/react-router'
import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useSandbox, useSnapshots } from '../api/queries'
import { useFilters } from '../lib/filters'
import { bytes, duration, localTime } from '../lib/format'
import { visible } from '../lib/visible'
import { Empty, Problem, Skeleton } from '../ui/controls'
import { Chart, type Mark, type Series } from './chart'

type Metric = Schemas['Metric']

const ranges: [string, string, number][] = [
  ['5m', '5 min', 300],
  ['15m', '15 min', 900],
  ['1h', '1 h', 3600],
  ['6h', '6 h', 21_600],
  ['24h', '24 h', 86_400],
]

/** Samples further apart than this belong to different runs of the guest. */
const GAP_S = 45
const INTERVAL_MS = 10_000

/** Inserts an empty sample into each gap, so that no line connects its ends. */
function withGaps(samples: Metric[]): (Metric | null)[] {
  return samples.flatMap((sample, index) => {
    const before = samples[index - 1]
    return before && sample.timestampUnix - before.timestampUnix > GAP_S ? [null, sample] : [sample]
  })
}

/** Bytes per second between two samples. The counters start at 0 with each guest. */
function rate(before: Metric | null | undefined, sample: Metric, of: (m: Metric) => number | undefined): number | null {
  const [a, b] = [before ? of(before) : undefined, of(sample)]
  if (!before || a === undefined || b === undefined || b < a) return null
  return (b - a) / Math.max(1, sample.timestampUnix - before.timestampUnix)
}

const perSecond = (n: number) => `${bytes(n)}/s`

/** Processor, memory, disk and network over time, with marks at snapshots and pauses. */
export function ChartsTab() {
  const { id } = useParams({ strict: false }) as { id: string }
  const [filters, update] = useFilters<{ range?: string }>()
  const [range, label, seconds] = ranges.find(([key]) => key === (filters.range ?? '15m')) ?? ranges[1]!
  const sandbox = useSandbox(id).data
  const snapshots = useSnapshots().data
  const metrics = useQuery({
    queryKey: ['metrics', id, range],
    queryFn: async ({ signal }) => {
      const end = Math.ceil(Date.now() / 1000)
      const query = { start: end - seconds, end }
      const samples = data(
        await api.GET('/sandboxes/{sandboxID}/metrics', { params: { path: { sandboxID: id }, query }, signal }),
      )!
      return { samples, start: end - seconds, end }
    },
    refetchInterval: INTERVAL_MS,
    placeholderData: keepPreviousData,
  })
  const marks = useMemo(() => {
    const names = { asked: 'snapshot', pause: 'pause', fork: 'fork', template: 'snapshot', step: 'snapshot' }
    return (snapshots ?? [])
      .filter((s) => s.jiffy.sandbox === id)
      .map((s): Mark => ({
        at: s.jiffy.created_ms / 1000,
        label: s.jiffy.name ? `${names[s.purpose]} ${visible(s.jiffy.name)}` : names[s.purpose],
      }))
  }, [snapshots, id])
  const samples = useMemo(() => withGaps(metrics.data?.samples ?? []), [metrics.data])
  const times = useMemo(
    () => samples.map((s, i) => (s ? s.timestampUnix : (samples[i - 1]?.timestampUnix ?? 0) + 1)),
    [samples],
  )
  const charts = useMemo(() => {
    const values = (of: (m: Metric, before: Metric | null | undefined) => number | null) =>
      samples.map((s, i) => (s ? of(s, samples[i - 1]) : null))
    const network = (of: (m: Metric) => number | undefined) => values((m, before) => rate(before, m, of))
    const list: [string, Series[], (n: number) => string, number | undefined][] = [
      [
        'Processors',
        [{ label: 'used', colour: '--accent', values: values((m) => m.cpuUsedPct / 100) }],
        (n) => n.toLocaleString(undefined, { maximumFractionDigits: 2 }),
        sandbox?.cpuCount,
      ],
      [
        'Memory',
        [
          { label: 'used', colour: '--accent', values: values((m) => m.memUsed) },
          { label: 'cache', colour: '--warn', values: values((m) => m.memCache) },
        ],
        bytes,
        samples.findLast((s) => s)?.memTotal,
      ],
      ['Disk', [{ label: 'used', colour: '--accent', values: values((m) => m.diskUsed) }], bytes, undefined],
      [
        'Network',
        [
          { label: 'received', colour: '--accent', values: network((m) => m.netBytesIn) },
          { label: 'sent', colour: '--good', values: network((m) => m.netBytesOut) },
        ],
        perSecond,
        undefined,
      ],
    ]
    return list
  }, [samples, sandbox?.cpuCount])
  const first = metrics.data?.samples[0]
  return (
    <div className="stack">
      <div className="filters">
        <div className="segments" role="group" aria-label="Range">
          {ranges.map(([key, text]) => (
            <button
              key={key}
              type="button"
              aria-pressed={key === range}
              onClick={() => update({ range: key === '15m' ? undefined : key })}>
              {text}
            </button>
          ))}
        </div>
        {first && metrics.data && first.timestampUnix - metrics.data.start > GAP_S && (
          <span className="muted">
            The first sample of the last {label} is {duration(metrics.data.end - first.timestampUnix)} old.
          </span>
        )}
      </div>
      {metrics.error && !metrics.data && <Problem error={metrics.error} onRetry={() => void metrics.refetch()} />}
      {!metrics.data && !metrics.error && <Skeleton rows={4} height={190} />}
      {metrics.data?.samples.length === 0 && (
        <Empty title={`No samples in the last ${label}`} command={`jiffy stats ${id}`}>
          <p>The daemon samples running sandboxes every 10 s.</p>
        </Empty>
      )}
      {metrics.data && metrics.data.samples.length > 0 && (
        <>
          <div className="charts">
            {charts.map(([title, series, format, maximum]) => (
              <Chart
                key={title}
                title={title}
                times={times}
                series={series}
                format={format}
                isBinary={title !== 'Processors'}
                maximum={maximum}
                start={metrics.data.start}
                end={metrics.data.end}
                marks={marks}
              />
            ))}
          </div>
          <Marks marks={marks} start={metrics.data.start} />
        </>
      )}
    </div>
  )
}

/** The marks as text, because charts have no text alternative of their own. */
function Marks({ marks, start }: { marks: Mark[]; start: number }) {
  const shown = marks.filter((mark) => mark.at >= start).sort((a, b) => b.at - a.at)
  if (shown.length === 0) return null
  return (
    <ul className="marks" aria-label="Marks in the charts">
      {shown.map((mark) => (
        <li key={mark.at + mark.label}>
          <span className="muted">{localTime(mark.at * 1000)}</span> {mark.label}
        </li>
      ))}
    </ul>
  )
}
