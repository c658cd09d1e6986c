import { useState } from 'react'
import { useNavigate } from '@tanstack/react-router'
import { api, CallError, data, type NewSandbox } from '../api/client'
import { useEngines, useHost, useLimits, useRefresh, useSnapshots, useTemplates } from '../api/queries'
import { useSession } from '../session'
import { commands } from '../lib/commands'
import { mib } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { Button, Dialog, Field, Problem } from '../ui/controls'
import { type EnteredTime, enteredSeconds, isValidTime, TimeInput } from '../ui/time-input'
import { notify } from '../ui/toast'

/** Parses lines `KEY=VALUE` of a text field. Returns an error message if a line has another form. */
function pairs(text: string): Record<string, string> | string {
  const found: Record<string, string> = {}
  for (const line of text.split('\n')) {
    if (!line.trim()) continue
    const at = line.indexOf('=')
    if (at < 1) return `“${line}” has no form KEY=VALUE`
    found[line.slice(0, at).trim()] = line.slice(at + 1)
  }
  return found
}

type FieldName =
  | 'template'
  | 'name'
  | 'cpu'
  | 'memory'
  | 'timeout'
  | 'idle'
  | 'network'
  | 'env'
  | 'metadata'
  | 'engine'

/** Returns the field that an error of the API is about. */
function fieldOf(error: CallError): FieldName | undefined {
  const { code, message } = error
  if (code === 'template_not_found' || code === 'snapshot_not_found') return 'template'
  if (code === 'name_taken' || /`name`/.test(message)) return 'name'
  if (/`memoryMB`/.test(message) || code === 'max_memory') return 'memory'
  if (/`cpuCount`/.test(message) || code === 'max_vcpus') return 'cpu'
  if (/`timeout`/.test(message)) return 'timeout'
  if (/`idleTimeout`/.test(message)) return 'idle'
  if (/allowOut|denyOut|network/.test(message)) return 'network'
  if (/envVars|environment/.test(message)) return 'env'
  if (/`metadata`/.test(message)) return 'metadata'
  if (code === 'engine_unavailable' || /`engine`/.test(message)) return 'engine'
  return undefined
}

export function CreateDialog({
  template,
  snapshot,
  onClose,
}: {
  template?: string
  snapshot?: string
  onClose: () => void
}) {
  const session = useSession()
  const navigate = useNavigate()
  const refresh = useRefresh()
  const templates = useTemplates().data ?? []
  const snapshots = (useSnapshots(false).data ?? []).filter((s) => s.purpose === 'asked')
  const engines = useEngines().data ?? []
  const host = useHost(session.isAdmin || session.scope === 'read').data
  const limits = useLimits().data
  const [form, setForm] = useState({
    source: snapshot ?? template ?? 'base',
    name: '',
    cpu: '',
    memory: '',
    onTimeout: 'kill',
    network: 'all',
    hosts: '',
    env: '',
    metadata: '',
    engine: '',
  })
  const [timeout, enterTimeout] = useState<EnteredTime>({ amount: '1', unit: '3600' })
  const [idle, enterIdle] = useState<EnteredTime>({ amount: '10', unit: 'default' })
  const [showEnv, setShowEnv] = useState(false)
  const [busy, setBusy] = useState(false)
  const [error, setError] = useState<unknown>()
  const set = (key: keyof typeof form) => (event: { target: { value: string } }) => {
    setForm({ ...form, [key]: event.target.value })
    setError(undefined)
  }
  const changed = (enter: (time: EnteredTime) => void) => (time: EnteredTime) => {
    enter(time)
    setError(undefined)
  }
  if (!session.mayChange) {
    return (
      <Dialog title="New sandbox" onClose={onClose}>
        <p>
          Creating a sandbox requires a key of scope <code>create</code> or <code>admin</code>. This session has a key
          of scope <code>read</code>.
        </p>
      </Dialog>
    )
  }
  const isSnapshot = snapshots.some((s) => s.snapshotID === form.source) || form.source === snapshot
  const chosen = templates.find((t) => t.names.includes(form.source) || t.templateID === form.source)
  const env = pairs(form.env)
  const metadata = pairs(form.metadata)
  const hosts = form.hosts.split(/[\s,]+/).filter(Boolean)
  const seconds = enteredSeconds(timeout) ?? -1
  const idleSeconds = idle.unit === 'never' ? 0 : enteredSeconds(idle)
  const body: NewSandbox = { templateID: form.source, timeout: seconds }
  if (form.name) body.name = form.name
  if (form.cpu) body.cpuCount = Number(form.cpu)
  if (form.memory) body.memoryMB = Number(form.memory)
  if (form.onTimeout === 'pause' && seconds !== -1) body.lifecycle = { onTimeout: 'pause', autoResume: true }
  if (idleSeconds !== undefined) body.idleTimeout = idleSeconds
  if (form.network === 'none') body.allow_internet_access = false
  if (form.network === 'list') body.network = { allowOut: hosts, denyOut: ['0.0.0.0/0'] }
  if (typeof env === 'object' && Object.keys(env).length) body.envVars = env
  if (typeof metadata === 'object' && Object.keys(metadata).length) body.metadata = metadata
  if (form.engine) body.engine = form.engine as NewSandbox['engine']

  const field = error instanceof CallError ? fieldOf(error) : undefined
  const problemOf = (name: FieldName) => (field === name && error instanceof CallError ? error.message : undefined)
  const isValid =
    typeof env === 'object' &&
    typeof metadata === 'object' &&
    isValidTime(timeout) &&
    isValidTime(idle) &&
    form.source !== ''
  const submit = async () => {
    setBusy(true)
    setError(undefined)
    try {
      const created = data(await api.POST('/v2/sandboxes', { body }))!
      refresh()
      notify(`Created ${created.name ?? created.sandboxID}`)
      await navigate({ to: '/sandboxes/$id', params: { id: created.sandboxID } })
    } catch (e) {
      setError(e)
      setBusy(false)
    }
  }
  const free = limits?.limits.memoryMB != null ? limits.limits.memoryMB - limits.used.memoryMB : undefined
  const capacity =
    free !== undefined
      ? `${mib(free)} left for this key`
      : host?.memoryAvailableMB
        ? `${mib(host.memoryAvailableMB)} available on the host`
        : undefined
  return (
    <Dialog title="New sandbox" wide onClose={onClose}>
      <form
        className="stack"
        onSubmit={(event) => {
          event.preventDefault()
          if (isValid) void submit()
        }}>
        <div className="form-grid">
          <Field
            id="source"
            label="Template or snapshot"
            problem={problemOf('template')}
            whole
            hint={
              chosen && `${chosen.cpuCount} processors, ${mib(chosen.memoryMB)} memory, ${mib(chosen.diskSizeMB)} disk`
            }>
            <input
              id="source"
              className="input"
              list="sources"
              value={form.source}
              onChange={set('source')}
              autoComplete="off"
              spellCheck={false}
            />
            <datalist id="sources">
              {templates.map((t) => (
                <option key={t.templateID + t.buildID} value={t.names[0] ?? t.templateID}>
                  template
                </option>
              ))}
              {snapshots.map((s) => (
                <option key={s.snapshotID} value={s.snapshotID}>
                  snapshot {visible(s.jiffy.name ?? '')}
                </option>
              ))}
            </datalist>
          </Field>
          <Field id="name" label="Name" problem={problemOf('name')} hint="Optional, unique among your sandboxes">
            <input
              id="name"
              className="input"
              value={form.name}
              onChange={set('name')}
              maxLength={63}
              autoFocus
              autoComplete="off"
              spellCheck={false}
            />
          </Field>
          <Field id="engine" label="Engine" problem={problemOf('engine')}>
            <select
              id="engine"
              className="select"
              style={{ width: '100%' }}
              value={form.engine}
              onChange={set('engine')}>
              <option value="">Default</option>
              {engines.map((e) => (
                <option key={e.name} value={e.name} disabled={!e.usable}>
                  {e.name}
                  {e.usable ? '' : ` (${e.why ?? 'not available'})`}
                </option>
              ))}
            </select>
          </Field>
          <Field id="cpu" label="Processors" problem={problemOf('cpu')}>
            <input
              id="cpu"
              className="input"
              type="number"
              min={1}
              max={64}
              placeholder={chosen ? String(chosen.cpuCount) : 'of the template'}
              value={form.cpu}
              onChange={set('cpu')}
            />
          </Field>
          <Field id="memory" label="Memory in MiB" problem={problemOf('memory')} hint={capacity}>
            <input
              id="memory"
              className="input"
              type="number"
              min={128}
              step={128}
              placeholder={chosen ? String(chosen.memoryMB) : 'of the template'}
              value={form.memory}
              onChange={set('memory')}
            />
          </Field>
          <Field id="timeout" label="Timeout" problem={problemOf('timeout')}>
            <TimeInput
              id="timeout"
              unitLabel="Unit of the timeout"
              choices={[['none', 'no limit']]}
              value={timeout}
              onChange={changed(enterTimeout)}
            />
          </Field>
          <Field id="action" label="At the timeout">
            <select
              id="action"
              className="select"
              style={{ width: '100%' }}
              disabled={seconds === -1}
              value={form.onTimeout}
              onChange={set('onTimeout')}>
              <option value="kill">kill the sandbox</option>
              <option value="pause">pause it, and resume it on request</option>
            </select>
          </Field>
          <Field
            id="idle"
            label="Idle timeout"
            problem={problemOf('idle')}
            whole
            hint="Time without use after which the sandbox is paused. Defaults to the value of the template or key.">
            <TimeInput
              id="idle"
              unitLabel="Unit of the idle timeout"
              choices={[
                ['default', 'default'],
                ['never', 'never'],
              ]}
              value={idle}
              onChange={changed(enterIdle)}
            />
          </Field>
          <Field id="network" label="Network" problem={problemOf('network')} whole>
            <div className="row wrap">
              <select id="network" className="select" value={form.network} onChange={set('network')}>
                <option value="all">Internet access</option>
                <option value="none">No internet access</option>
                <option value="list">Only these hosts</option>
              </select>
              {form.network === 'list' && (
                <input
                  className="input grow"
                  style={{ minWidth: 180 }}
                  aria-label="Allowed hosts"
                  placeholder="pypi.org, *.example.com, 192.0.2.0/24"
                  value={form.hosts}
                  onChange={set('hosts')}
                />
              )}
            </div>
          </Field>
          <Field
            id="env"
            label="Environment"
            problem={typeof env === 'string' ? env : problemOf('env')}
            hint="KEY=VALUE, one per line">
            <textarea
              id="env"
              className={`textarea mono${showEnv ? '' : ' concealed'}`}
              spellCheck={false}
              autoComplete="off"
              value={form.env}
              onChange={set('env')}
            />
            <label className="row plain">
              <input type="checkbox" checked={showEnv} onChange={(e) => setShowEnv(e.target.checked)} /> Show values
            </label>
          </Field>
          <Field
            id="metadata"
            label="Metadata"
            problem={typeof metadata === 'string' ? metadata : problemOf('metadata')}
            hint="KEY=VALUE, one per line">
            <textarea
              id="metadata"
              className="textarea mono"
              spellCheck={false}
              value={form.metadata}
              onChange={set('metadata')}
            />
          </Field>
        </div>
        {error !== undefined && !field && <Problem error={error} title="The sandbox was not created" />}
        <AsCommand command={commands.create(body, isSnapshot)} />
        <div className="buttons">
          <Button onClick={onClose}>Cancel</Button>
          <Button type="submit" look="primary" busy={busy} disabled={!isValid}>
            Create
          </Button>
        </div>
      </form>
    </Dialog>
  )
}
