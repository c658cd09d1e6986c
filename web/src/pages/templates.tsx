import { useEffect, useMemo, useRef, useState } from 'react'
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useSandboxes, useTemplates } from '../api/queries'
import { useSession } from '../session'
import type { Command } from '../lib/commands'
import { count, mib } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Dialog, Empty, Field, Menu, Problem, Skeleton, Time } from '../ui/controls'
import { Icon } from '../ui/icons'

type Template = Schemas['Template'] | NonNullable<ReturnType<typeof useTemplates>['data']>[number]

const nameOf = (t: Template) => t.names[0] ?? t.templateID

export function TemplatesPage() {
  const search = useSearch({ strict: false }) as { q?: string; build?: string }
  const navigate = useNavigate()
  const session = useSession()
  const queries = useQueryClient()
  const list = useTemplates()
  const sandboxes = useSandboxes().data
  const [dialog, setDialog] = useState<
    { kind: 'build' } | { kind: 'remove' | 'publish' | 'history'; template: Template }
  >()
  const reload = () => void queries.invalidateQueries({ queryKey: ['templates'] })
  const uses = useMemo(() => {
    const found = new Map<string, number>()
    for (const s of sandboxes ?? []) found.set(s.alias, (found.get(s.alias) ?? 0) + 1)
    return found
  }, [sandboxes])
  const all = list.data ?? []
  const q = (search.q ?? '').toLowerCase()
  const shown = all.filter((t) => !q || t.templateID.startsWith(q) || t.names.some((n) => n.toLowerCase().includes(q)))
  const running = search.build?.split('/')
  return (
    <div className="page fill">
      <header className="page-head">
        <h1>Templates</h1>
        {list.data && <span className="muted">{count(all.length, 'template')}</span>}
        <div className="actions">
          {session.mayChange && (
            <Button look="primary" icon="plus" onClick={() => setDialog({ kind: 'build' })}>
              Build a template
            </Button>
          )}
        </div>
      </header>
      {list.error && !list.data && <Problem error={list.error} onRetry={() => void list.refetch()} />}
      {!list.data && !list.error && <Skeleton rows={5} height={30} />}
      {list.data && all.length === 0 && (
        <Empty title="No templates yet" command="jiffy template build base">
          <p>A template is the root file system of new sandboxes.</p>
        </Empty>
      )}
      {all.length > 0 && (
        <>
          <div className="filters">
            <input
              className="input search"
              type="search"
              aria-label="Filter by name"
              placeholder="Name or id"
              value={search.q ?? ''}
              onChange={(e) =>
                void navigate({
                  to: '/templates',
                  search: { ...search, q: e.target.value || undefined },
                  replace: true,
                })
              }
            />
          </div>
          <div className="table-wrap cards-narrow" tabIndex={0} role="region" aria-label="Templates">
            <table className="table">
              <thead>
                <tr>
                  <th>Name</th>
                  <th>Status</th>
                  <th>Visibility</th>
                  <th className="num">Processors</th>
                  <th className="num">Memory</th>
                  <th className="num">Disk</th>
                  <th className="num">Builds</th>
                  <th className="num">Sandboxes</th>
                  <th>Updated</th>
                  <th>
                    <span className="sr-only">Actions</span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {shown.map((t) => (
                  <tr key={t.templateID + t.buildID}>
                    <td className="name">
                      {session.mayChange ? (
                        <Link to="/new" search={{ template: nameOf(t) }}>
                          {visible(nameOf(t))}
                        </Link>
                      ) : (
                        visible(nameOf(t))
                      )}
                      {t.names.slice(1).map((n) => (
                        <span key={n} className="sub">
                          {visible(n)}
                        </span>
                      ))}
                    </td>
                    <td>
                      <BuildBadge status={t.buildStatus} />
                    </td>
                    <td className="wide-only">{t.public ? 'public' : 'private'}</td>
                    <td className="num wide-only">{t.cpuCount}</td>
                    <td className="num wide-only">{mib(t.memoryMB)}</td>
                    <td className="num wide-only">{mib(t.diskSizeMB)}</td>
                    <td className="num wide-only">{t.buildCount}</td>
                    <td className="num card-line">{uses.get(nameOf(t)) ?? 0}</td>
                    <td className="card-line">
                      <Time at={t.updatedAt} />
                    </td>
                    <td className="actions-cell">
                      <Menu
                        label={`Actions on ${visible(nameOf(t))}`}
                        entries={[
                          ...(session.mayChange
                            ? [
                                {
                                  label: 'Create a sandbox',
                                  icon: 'plus' as const,
                                  onSelect: () => void navigate({ to: '/new', search: { template: nameOf(t) } }),
                                },
                              ]
                            : []),
                          {
                            label: 'History',
                            icon: 'clock' as const,
                            onSelect: () => setDialog({ kind: 'history', template: t }),
                          },
                          ...(session.mayChange
                            ? [
                                {
                                  label: t.public ? 'Make private' : 'Make public',
                                  icon: 'open' as const,
                                  onSelect: () => setDialog({ kind: 'publish', template: t }),
                                },
                                'line' as const,
                                {
                                  label: 'Delete',
                                  icon: 'trash' as const,
                                  danger: true,
                                  onSelect: () => setDialog({ kind: 'remove', template: t }),
                                },
                              ]
                            : []),
                        ]}
                      />
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </>
      )}
      {dialog?.kind === 'build' && (
        <BuildDialog
          onClose={() => setDialog(undefined)}
          onStarted={(id) => {
            setDialog(undefined)
            reload()
            void navigate({ to: '/templates', search: { ...search, build: id } })
          }}
        />
      )}
      {dialog?.kind === 'history' && <HistoryDialog template={dialog.template} onClose={() => setDialog(undefined)} />}
      {dialog?.kind === 'remove' && (
        <ConfirmDialog
          title={`Delete ${visible(nameOf(dialog.template))}?`}
          label="Delete"
          danger
          onClose={() => setDialog(undefined)}
          onDone={reload}
          command={{
            jiffy: ['template', 'rm', nameOf(dialog.template)],
            method: 'DELETE',
            path: `/templates/${encodeURIComponent(dialog.template.templateID)}`,
          }}
          run={() =>
            api.DELETE('/templates/{templateID}', { params: { path: { templateID: dialog.template.templateID } } })
          }>
          Existing sandboxes and snapshots of the template remain.
        </ConfirmDialog>
      )}
      {dialog?.kind === 'publish' && (
        <ConfirmDialog
          title={`Make ${visible(nameOf(dialog.template))} ${dialog.template.public ? 'private' : 'public'}?`}
          label={dialog.template.public ? 'Make private' : 'Make public'}
          onClose={() => setDialog(undefined)}
          onDone={reload}
          command={{
            method: 'PATCH',
            path: `/v2/templates/${encodeURIComponent(dialog.template.templateID)}`,
            body: { public: !dialog.template.public },
          }}
          run={() =>
            api.PATCH('/v2/templates/{templateID}', {
              params: { path: { templateID: dialog.template.templateID } },
              body: { public: !dialog.template.public },
            })
          }>
          {dialog.template.public
            ? 'Other keys can no longer create sandboxes from it.'
            : 'All keys of this host can create sandboxes from it.'}
        </ConfirmDialog>
      )}
      {running?.[0] && running[1] && (
        <BuildLog
          template={running[0]}
          build={running[1]}
          onClose={() => {
            reload()
            void navigate({ to: '/templates', search: { ...search, build: undefined } })
          }}
        />
      )}
    </div>
  )
}

function BuildBadge({ status }: { status: string }) {
  const look = status === 'ready' ? 'good' : status === 'error' ? 'bad' : 'busy'
  return <span className={`badge ${look}`}>{status}</span>
}

/** Builds a template from an image or another template, with commands. */
function BuildDialog({ onClose, onStarted }: { onClose: () => void; onStarted: (id: string) => void }) {
  const [form, setForm] = useState({
    name: '',
    source: 'image',
    image: 'python:3.12',
    template: 'base',
    steps: '',
    start: '',
  })
  const [error, setError] = useState<unknown>()
  const [busy, setBusy] = useState(false)
  const set = (key: keyof typeof form) => (event: { target: { value: string } }) =>
    setForm({ ...form, [key]: event.target.value })
  const steps = form.steps
    .split('\n')
    .filter((line) => line.trim())
    .map((line) => ({ type: 'RUN' as const, args: [line] }))
  const body = {
    ...(form.source === 'image' ? { fromImage: form.image } : { fromTemplate: form.template }),
    ...(steps.length ? { steps } : {}),
    ...(form.start ? { startCmd: form.start } : {}),
  }
  const command: Command[] = [
    { method: 'POST', path: '/v3/templates', body: { name: form.name } },
    { method: 'POST', path: '/v2/templates/TEMPLATE_ID/builds/BUILD_ID', body },
  ]
  const submit = async () => {
    setBusy(true)
    setError(undefined)
    try {
      const { templateID, buildID } = data(await api.POST('/v3/templates', { body: { name: form.name } }))!
      await api.POST('/v2/templates/{templateID}/builds/{buildID}', { params: { path: { templateID, buildID } }, body })
      onStarted(`${templateID}/${buildID}`)
    } catch (e) {
      setError(e)
      setBusy(false)
    }
  }
  return (
    <Dialog title="Build a template" wide onClose={onClose}>
      <form
        className="stack"
        onSubmit={(e) => {
          e.preventDefault()
          void submit()
        }}>
        <div className="form-grid">
          <Field id="template-name" label="Name">
            <input
              id="template-name"
              className="input"
              required
              autoFocus
              value={form.name}
              onChange={set('name')}
              autoComplete="off"
              spellCheck={false}
            />
          </Field>
          <Field id="template-source" label="Starting point">
            <div className="row">
              <select
                className="select"
                aria-label="Kind of the starting point"
                value={form.source}
                onChange={set('source')}>
                <option value="image">Image</option>
                <option value="template">Template</option>
              </select>
              {form.source === 'image' ? (
                <input
                  id="template-source"
                  className="input"
                  value={form.image}
                  onChange={set('image')}
                  spellCheck={false}
                />
              ) : (
                <input
                  id="template-source"
                  className="input"
                  value={form.template}
                  onChange={set('template')}
                  spellCheck={false}
                />
              )}
            </div>
          </Field>
          <Field id="template-steps" label="Commands" whole hint="One per line, run as root in a sandbox of the build">
            <textarea
              id="template-steps"
              className="textarea mono"
              value={form.steps}
              onChange={set('steps')}
              spellCheck={false}
              placeholder="pip install numpy"
            />
          </Field>
          <Field id="template-start" label="Start command" whole hint="Optional: runs in each new sandbox">
            <input
              id="template-start"
              className="input mono"
              value={form.start}
              onChange={set('start')}
              spellCheck={false}
            />
          </Field>
        </div>
        {error !== undefined && <Problem error={error} />}
        <AsCommand command={command} />
        <div className="buttons">
          <Button onClick={onClose}>Cancel</Button>
          <Button type="submit" look="primary" busy={busy} disabled={!form.name}>
            Build
          </Button>
        </div>
      </form>
    </Dialog>
  )
}

/** The log of a build, which is followed until the build ends. */
function BuildLog({ template, build, onClose }: { template: string; build: string; onClose: () => void }) {
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
  useEffect(() => end.current?.scrollIntoView({ block: 'end' }), [lines.length])
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

function HistoryDialog({ template, onClose }: { template: Template; onClose: () => void }) {
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
