import { useEffect, useRef, useState } from 'react'
import { useNavigate } from '@tanstack/react-router'
import { useQuery } from '@tanstack/react-query'
import { api, data } from '../api/client'
import { visible } from '../lib/visible'
import { Button, Dialog, Problem, Skeleton, Time } from '../ui/controls'
import { Icon } from '../ui/icons'
import { nameOf, type Template } from './templates'

export function BuildBadge({ status }: { status: string }) {
  const look = status === 'ready' ? 'good' : status === 'error' ? 'bad' : 'busy'
  return <span className={`badge ${look}`}>{status}</span>
}

/** The log of a build, which is followed until the build ends. */
export function BuildLog({ template, build, onClose }: { template: string; build: string; onClose: () => void }) {
  const path = { templateID: template, buildID: build }
  const [search, setSearch] = useState('')
  const [lines, setLines] = useState<string[]>([])
  const end = useRef<HTMLDivElement>(null)
  const status = useQuery({
    queryKey: ['build', template, build],
    queryFn: async ({ signal }) => {
      let offset = lines.length
      for (;;) {
        const part = data(
          await api.GET('/templates/{templateID}/builds/{buildID}/status', {
            params: { path, query: { logsOffset: offset, limit: 100 } as never },
            signal,
          }),
        )!
        if (part.logs.length > 0) setLines((all) => (all.length <= offset ? [...all, ...part.logs] : all))
        offset += part.logs.length
        if (part.logs.length < 100) return part
      }
    },
    refetchInterval: (query) =>
      query.state.data?.status === 'ready' || query.state.data?.status === 'error' ? false : 1000,
    retry: false,
  })
  useEffect(() => {
    // New browsers return a promise, which is no clean-up function.
    void end.current?.scrollIntoView({ block: 'end' })
  }, [lines.length])
  const state = status.data?.status
  const isOver = state === 'ready' || state === 'error'
  const shown = search ? lines.filter((l) => l.toLowerCase().includes(search.toLowerCase())) : lines
  return (
    <Dialog title="Build" wide onClose={onClose}>
      <div className="row spread wrap">
        <BuildBadge status={state ?? 'waiting'} />
        {status.data?.progress && !isOver && (
          <span className="muted">
            {visible(status.data.progress.text)} {status.data.progress.percent} %
          </span>
        )}
        <input
          className="input"
          style={{ width: 180 }}
          type="search"
          aria-label="Search in the log"
          placeholder="Search"
          value={search}
          onChange={(e) => setSearch(e.target.value)}
        />
      </div>
      {status.error && <Problem error={status.error} onRetry={() => void status.refetch()} />}
      {status.data?.reason && (
        <div className="problem-box" role="alert">
          <strong>
            The build failed{status.data.reason.step ? ` at step ${visible(status.data.reason.step)}` : ''}
          </strong>
          <pre>{visible(status.data.reason.message)}</pre>
        </div>
      )}
      <div className="paste mono build-log" tabIndex={0} role="log" aria-label="Log of the build">
        {shown.map((line, index) => (
          <div key={index}>{visible(line)}</div>
        ))}
        <div ref={end} />
      </div>
      <div className="buttons">
        {!isOver && (
          <Button
            look="danger"
            onClick={() =>
              void api.POST('/templates/{templateID}/builds/{buildID}/cancel', { params: { path } }).then(
                () => status.refetch(),
                () => {},
              )
            }>
            Cancel the build
          </Button>
        )}
        <Button look="primary" onClick={onClose}>
          {isOver ? 'Close' : 'Continue in the background'}
        </Button>
      </div>
    </Dialog>
  )
}

export function HistoryDialog({ template, onClose }: { template: Template; onClose: () => void }) {
  const navigate = useNavigate()
  const detail = useQuery({
    queryKey: ['template', template.templateID],
    queryFn: async ({ signal }) =>
      data(
        await api.GET('/templates/{templateID}', { params: { path: { templateID: template.templateID } }, signal }),
      )!,
  })
  const builds =
    (
      detail.data as
        { builds?: { buildID: string; status: string; createdAt: string; finishedAt?: string | null }[] } | undefined
    )?.builds ?? []
  return (
    <Dialog title={`Builds of ${visible(nameOf(template))}`} wide onClose={onClose}>
      {detail.error && <Problem error={detail.error} />}
      {detail.isLoading && <Skeleton rows={3} />}
      <ul className="bulk-list" tabIndex={0} aria-label="Builds">
        {builds.map((b) => (
          <li key={b.buildID} className="row">
            <BuildBadge status={b.status} />
            <code className="truncate">{b.buildID}</code>
            <span className="grow right muted">
              <Time at={b.createdAt} />
            </span>
            <Button
              small
              onClick={() => {
                onClose()
                void navigate({ to: '/templates', search: { build: `${template.templateID}/${b.buildID}` } })
              }}>
              <Icon name="file" />
              Log
            </Button>
          </li>
        ))}
      </ul>
    </Dialog>
  )
}
