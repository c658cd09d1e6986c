import { useMemo, useState } from 'react'
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { useQueryClient } from '@tanstack/react-query'
import { api, type Schemas } from '../api/client'
import { useSandboxes, useTemplates } from '../api/queries'
import { useSession } from '../session'
import { templateCommands } from '../lib/template-commands'
import { sorted } from '../lib/filters'
import { count, mib } from '../lib/format'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Empty, Menu, Problem, Skeleton, Time } from '../ui/controls'
import { SortHeading } from '../ui/sort-heading'
import { SearchField } from '../ui/filters'
import { BuildDialog } from './template-build'
import { BuildBadge, BuildLog, HistoryDialog, RecipeLog } from './template-log'
import { TagsDialog } from './template-tags'

export type Template = Schemas['Template'] | NonNullable<ReturnType<typeof useTemplates>['data']>[number]

/** Prefix of the parameter `build` for the build of a recipe. */
export const RECIPE = 'recipe:'

export const nameOf = (t: Template) => t.names[0] ?? t.templateID

export function TemplatesPage() {
  const search = useSearch({ strict: false }) as { q?: string; build?: string; sort?: string }
  const navigate = useNavigate()
  const session = useSession()
  const queries = useQueryClient()
  const list = useTemplates()
  const sandboxes = useSandboxes().data
  const [dialog, setDialog] = useState<
    { kind: 'build' } | { kind: 'remove' | 'publish' | 'history' | 'tags'; template: Template }
  >()
  const reload = () => {
    for (const key of ['templates', 'recipes']) void queries.invalidateQueries({ queryKey: [key] })
  }
  const uses = useMemo(() => {
    const found = new Map<string, number>()
    for (const s of sandboxes ?? []) found.set(s.alias, (found.get(s.alias) ?? 0) + 1)
    return found
  }, [sandboxes])
  const all = list.data ?? []
  const q = (search.q ?? '').toLowerCase()
  const sort = search.sort ?? 'name'
  const shown = sorted(
    all.filter((t) => !q || t.templateID.startsWith(q) || t.names.some((n) => n.toLowerCase().includes(q))),
    sort,
    {
      name: nameOf,
      processors: (t) => -t.cpuCount,
      memory: (t) => -t.memoryMB,
      disk: (t) => -t.diskSizeMB,
      sandboxes: (t) => -(uses.get(nameOf(t)) ?? 0),
      updated: (t) => -Date.parse(t.updatedAt),
    },
  )
  const heading = {
    sort,
    onSort: (next: string) => void navigate({ to: '/templates', search: { ...search, sort: next }, replace: true }),
  }
  // The builds of recipes have no ids.
  const recipe = search.build?.startsWith(RECIPE) ? search.build.slice(RECIPE.length) : undefined
  const running = recipe === undefined ? search.build?.split('/') : undefined
  const closeLog = () => {
    reload()
    void navigate({ to: '/templates', search: { ...search, build: undefined } })
  }
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
            <SearchField
              label="Filter by name"
              placeholder="Name or id"
              value={search.q}
              onChange={(q) => void navigate({ to: '/templates', search: { ...search, q }, replace: true })}
            />
          </div>
          <div className="table-wrap cards-narrow" tabIndex={0} role="region" aria-label="Templates">
            <table className="table">
              <thead>
                <tr>
                  <SortHeading id="name" label="Name" {...heading} />
                  <th>Status</th>
                  <th>Visibility</th>
                  <SortHeading id="processors" label="Processors" isNumber {...heading} />
                  <SortHeading id="memory" label="Memory" isNumber {...heading} />
                  <SortHeading id="disk" label="Disk" isNumber {...heading} />
                  <th className="num">Builds</th>
                  <SortHeading id="sandboxes" label="Sandboxes" isNumber {...heading} />
                  <SortHeading id="updated" label="Updated" {...heading} />
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
                    <td className="num card-line" data-label="Sandboxes">
                      {uses.get(nameOf(t)) ?? 0}
                    </td>
                    <td className="card-line" data-label="Updated">
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
                          {
                            label: 'Tags',
                            icon: 'templates' as const,
                            onSelect: () => setDialog({ kind: 'tags', template: t }),
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
      {dialog?.kind === 'tags' && (
        <TagsDialog
          template={dialog.template}
          onClose={() => {
            setDialog(undefined)
            reload()
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
          command={templateCommands.remove(dialog.template.templateID, nameOf(dialog.template))}
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
          command={templateCommands.publish(
            dialog.template.templateID,
            nameOf(dialog.template),
            !dialog.template.public,
          )}
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
      {running?.[0] && running[1] && <BuildLog template={running[0]} build={running[1]} onClose={closeLog} />}
      {recipe !== undefined && <RecipeLog recipe={recipe} onClose={closeLog} />}
    </div>
  )
}
