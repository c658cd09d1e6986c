import { useEffect, useRef, useState } from 'react'
import uPlot from 'uplot'
import 'uplot/dist/uPlot.min.css'

export interface Series {
  label: string
  /** Custom property with the colour. */
  colour: string
  values: (number | null)[]
}

/** A vertical line, at a time in seconds since 1970. */
export interface Mark {
  at: number
  label: string
}

const HEIGHT = 170
const BINARY_STEPS = Array.from({ length: 50 }, (_, i) => 2 ** i)
const clock = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hour12: false })

/** Value of a custom property in the current colour scheme. */
const property = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()

/** Counts changes of the colour scheme: a canvas does not follow custom properties. */
function useColourScheme(): number {
  const [changes, setChanges] = useState(0)
  useEffect(() => {
    const changed = () => setChanges((n) => n + 1)
    const media = matchMedia('(prefers-color-scheme: dark)')
    media.addEventListener('change', changed)
    const theme = new MutationObserver(changed)
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ['data-theme'] })
    return () => {
      media.removeEventListener('change', changed)
      theme.disconnect()
    }
  }, [])
  return changes
}

function drawMarks(plot: uPlot, marks: Mark[]) {
  const { ctx, bbox } = plot
  ctx.save()
  ctx.strokeStyle = property('--muted')
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio])
  for (const mark of marks) {
    const x = plot.valToPos(mark.at, 'x', true)
    if (x < bbox.left || x > bbox.left + bbox.width) continue
    ctx.beginPath()
    ctx.moveTo(x, bbox.top)
    ctx.lineTo(x, bbox.top + bbox.height)
    ctx.stroke()
  }
  ctx.restore()
}

export function Chart({
  title,
  times,
  series,
  format,
  isBinary,
  maximum,
  start,
  end,
  marks,
}: {
  title: string
  times: number[]
  series: Series[]
  format: (n: number) => string
  /** True if the values are bytes: the steps of the axis are then powers of two. */
  isBinary: boolean
  maximum?: number
  start: number
  end: number
  marks: Mark[]
}) {
  const frame = useRef<HTMLDivElement>(null)
  const plot = useRef<uPlot>(undefined)
  const [at, setAt] = useState<number | null>(null)
  const scheme = useColourScheme()
  const current = useRef({ marks, range: [start, end] as [number, number], maximum })
  current.current = { marks, range: [start, end], maximum }

  useEffect(() => {
    const box = frame.current
    if (!box) return
    const axis = { stroke: property('--muted'), grid: { stroke: property('--line'), width: 1 }, font: '11px system-ui' }
    const created = new uPlot(
      {
        width: box.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: 'charts' }, drag: { x: false, y: false }, points: { size: 6 } },
        scales: {
          x: { range: () => current.current.range },
          y: { range: (_, __, high) => [0, Math.max(current.current.maximum ?? 0, high * 1.05, Number.MIN_VALUE)] },
        },
        axes: [
          { ...axis, values: (_, values) => values.map((at) => clock.format(at * 1000)) },
          { ...axis, size: 72, values: (_, values) => values.map(format), incrs: isBinary ? BINARY_STEPS : undefined },
        ],
        series: [
          {},
          ...series.map((s) => ({
            label: s.label,
            stroke: property(s.colour),
            width: 1.75,
            fill: `color-mix(in srgb, ${property(s.colour)} 12%, transparent)`,
            points: { show: times.length < 3 },
          })),
        ],
        hooks: {
          draw: [(self) => drawMarks(self, current.current.marks)],
          setCursor: [(self) => setAt(self.cursor.idx ?? null)],
        },
      },
      [times, ...series.map((s) => s.values)],
      box,
    )
    plot.current = created
    const resized = new ResizeObserver(() => created.setSize({ width: box.clientWidth, height: HEIGHT }))
    resized.observe(box)
    return () => {
      resized.disconnect()
      created.destroy()
      plot.current = undefined
    }
    // New samples do not create the chart again.
  }, [scheme, series.length])
  useEffect(() => {
    plot.current?.setData([times, ...series.map((s) => s.values)])
  }, [times, series, start, end, marks])

  const shown = at ?? times.findLastIndex((_, i) => series.some((s) => s.values[i] != null))
  const text = series
    .map((s) => {
      const value = s.values[shown]
      return `${s.label} ${value == null ? '–' : format(value)}`
    })
    .join(', ')
  return (
    <figure className="card chart">
      <figcaption className="card-head">
        <h2>{title}</h2>
        <span className="row muted">
          {series.map((s) => {
            const value = s.values[shown]
            return (
              <span key={s.label} className="row">
                <span className={`dot-of ${s.colour.slice(2)}`} aria-hidden="true" />
                {s.label} {value == null ? '–' : format(value)}
              </span>
            )
          })}
          {maximum !== undefined && <span>of {format(maximum)}</span>}
        </span>
      </figcaption>
      <div ref={frame} role="img" aria-label={`${title} over time. Now: ${text}`} />
    </figure>
  )
}
