import { useState } from 'react'
import { useQuery } from '@tanstack/react-query'
import { api, data } from '../api/client'
import { useSession } from '../session'
import { templateCommands } from '../lib/template-commands'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { Button, Dialog, Empty, Field, Problem, Skeleton, Time } from '../ui/controls'
import { nameOf, type Template } from './templates'

/** Tags of a template. A tag refers to a build. */
export function TagsDialog({ template, onClose }: { template: Template; onClose: () => void }) {
  const session = useSession()
  const name = nameOf(template)
  const [tag, setTag] = useState('')
  const [source, setSource] = useState('')
  const [removal, setRemoval] = useState<string>()
  const [busy, setBusy] = useState(false)
  const [error, setError] = useState<unknown>()
  const list = useQuery({
    queryKey: ['tags', template.templateID],
    queryFn: async ({ signal }) =>
      data(
        await api.GET('/templates/{templateID}/tags', {
          params: { path: { templateID: template.templateID } },
          signal,
        }),
      )!,
  })
  const target = source ? `${name}:${source}` : name
  const change = async (action: () => Promise<unknown>) => {
    setBusy(true)
    setError(undefined)
    try {
      await action()
      setTag('')
      setRemoval(undefined)
      await list.refetch()
    } catch (e) {
      setError(e)
    } finally {
      setBusy(false)
    }
  }
  return (
    <Dialog title={`Tags of ${visible(name)}`} wide onClose={onClose}>
      {list.error && !list.data && <Problem error={list.error} onRetry={() => void list.refetch()} />}
      {!list.data && !list.error && <Skeleton rows={3} />}
      {list.data?.length === 0 && <Empty title="No tags" command={`jiffy template tag ${name} ${name}:stable`} />}
      <ul className="bulk-list" tabIndex={0} aria-label="Tags">
        {list.data?.map((t) => (
          <li key={t.tag} className="row">
            <strong className="truncate">{visible(t.tag)}</strong>
            <code className="truncate muted">{t.buildID}</code>
            <span className="grow right muted">
              <Time at={t.createdAt} />
            </span>
            {session.mayChange && (
              <Button
                small
                look="ghost"
                icon="trash"
                label={`Remove ${visible(t.tag)}`}
                onClick={() => setRemoval(t.tag)}
              />
            )}
          </li>
        ))}
      </ul>
      {error !== undefined && <Problem error={error} />}
      {removal !== undefined && (
        <div className="problem-box">
          <strong>Remove the tag {visible(removal)}?</strong>
          <AsCommand command={templateCommands.removeTag(name, removal)} />
          <div className="row">
            <Button
              look="danger"
              busy={busy}
              onClick={() => void change(() => api.DELETE('/templates/tags', { body: { name, tags: [removal] } }))}>
              Remove
            </Button>
            <Button onClick={() => setRemoval(undefined)}>Keep it</Button>
          </div>
        </div>
      )}
      {session.mayChange && (
        <form
          className="stack"
          onSubmit={(e) => {
            e.preventDefault()
            void change(() => api.POST('/templates/tags', { body: { target, tags: [tag] } }))
          }}>
          <div className="form-grid">
            <Field id="tag" label="New tag">
              <input
                id="tag"
                className="input"
                value={tag}
                onChange={(e) => setTag(e.target.value)}
                autoComplete="off"
                spellCheck={false}
              />
            </Field>
            <Field id="tag-source" label="Build">
              <select id="tag-source" className="select" value={source} onChange={(e) => setSource(e.target.value)}>
                <option value="">the current build</option>
                {list.data?.map((t) => (
                  <option key={t.tag} value={t.tag}>
                    the build of {visible(t.tag)}
                  </option>
                ))}
              </select>
            </Field>
          </div>
          {tag && <AsCommand command={templateCommands.addTag(target, tag)} />}
          <div className="buttons">
            <Button onClick={onClose}>Close</Button>
            <Button type="submit" look="primary" busy={busy} disabled={!tag}>
              Add the tag
            </Button>
          </div>
        </form>
      )}
    </Dialog>
  )
}
