import { useState } from 'react'
import { api, data } from '../api/client'
import { DockerfileError, parseDockerfile } from '../lib/dockerfile'
import { type Build, templateCommands } from '../lib/template-commands'
import { useTemplates } from '../api/queries'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Field } from '../ui/controls'
import { nameOf } from './templates'

type Source = 'dockerfile' | 'image' | 'template'

/** Builds a template from the text of a Dockerfile, an image, or another template with commands. */
export function BuildDialog({ onClose, onStarted }: { onClose: () => void; onStarted: (id: string) => void }) {
  const templates = useTemplates().data ?? []
  const [form, setForm] = useState({
    name: '',
    source: 'dockerfile' as Source,
    dockerfile: 'FROM base\nRUN ',
    image: 'python:3.12',
    template: 'base',
    commands: '',
    start: '',
    ready: '',
  })
  const [started, setStarted] = useState<string>()
  const set = (key: keyof typeof form) => (event: { target: { value: string } }) =>
    setForm({ ...form, [key]: event.target.value })
  const commands = form.commands.split('\n').filter((line) => line.trim())

  let problem: string | undefined
  let parsed: ReturnType<typeof parseDockerfile> | undefined
  if (form.source === 'dockerfile') {
    try {
      parsed = parseDockerfile(form.dockerfile)
    } catch (error) {
      if (!(error instanceof DockerfileError)) throw error
      problem = error.message
    }
  }
  // A name after FROM is a template of this host if one exists.
  const isTemplate = parsed && templates.some((t) => t.names.includes(parsed.from) || nameOf(t) === parsed.from)
  const origin =
    form.source === 'image' || (parsed && !isTemplate)
      ? { fromImage: parsed?.from ?? form.image }
      : { fromTemplate: parsed?.from ?? form.template }
  const steps = parsed?.steps ?? commands.map((line) => ({ type: 'RUN' as const, args: [line, 'root'] }))
  const body = {
    ...origin,
    ...(steps.length > 0 ? { steps } : {}),
    ...(form.start ? { startCmd: form.start, ...(form.ready ? { readyCmd: form.ready } : {}) } : {}),
  }
  const build: Build = {
    name: form.name,
    ...(form.source === 'dockerfile' ? { dockerfile: form.dockerfile } : origin),
    commands: form.source === 'dockerfile' ? [] : commands,
    ...(form.start ? { start: form.start, ready: form.ready || undefined } : {}),
  }
  const run = async () => {
    const { templateID, buildID } = data(await api.POST('/v3/templates', { body: { name: form.name } }))!
    await api.POST('/v2/templates/{templateID}/builds/{buildID}', { params: { path: { templateID, buildID } }, body })
    setStarted(`${templateID}/${buildID}`)
    onStarted(`${templateID}/${buildID}`)
  }
  const text = (key: 'image' | 'start' | 'ready', label: string, hint?: string, whole = false) => (
    <Field id={`build-${key}`} label={label} hint={hint} whole={whole}>
      <input
        id={`build-${key}`}
        className="input mono"
        value={form[key]}
        onChange={set(key)}
        autoComplete="off"
        spellCheck={false}
      />
    </Field>
  )
  return (
    <ConfirmDialog
      title="Build a template"
      label="Build"
      wide
      isOpenAfterwards
      disabled={!form.name || problem !== undefined || started !== undefined}
      command={templateCommands.build(build, body)}
      onClose={onClose}
      run={run}>
      <div className="form-grid">
        <Field id="template-name" label="Name" hint="Optionally with a tag: name:tag">
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
        <Field id="build-source" label="Source">
          <select id="build-source" className="select" value={form.source} onChange={set('source')}>
            <option value="dockerfile">Dockerfile</option>
            <option value="image">Image with commands</option>
            <option value="template">Template with commands</option>
          </select>
        </Field>
        {form.source === 'dockerfile' && (
          <Field
            id="build-dockerfile"
            label="Dockerfile"
            whole
            problem={problem}
            hint="One stage without files: FROM, RUN, ENV, WORKDIR, USER. CMD and ENTRYPOINT do not run">
            <textarea
              id="build-dockerfile"
              className="textarea mono tall"
              value={form.dockerfile}
              onChange={set('dockerfile')}
              spellCheck={false}
            />
          </Field>
        )}
        {form.source === 'image' && text('image', 'Image', '[HOST[:PORT]/]NAME[:TAG|@DIGEST]', true)}
        {form.source === 'template' && (
          <Field id="build-template" label="Template" whole>
            <select id="build-template" className="select" value={form.template} onChange={set('template')}>
              {templates.map((t) => (
                <option key={t.templateID} value={nameOf(t)}>
                  {visible(nameOf(t))}
                </option>
              ))}
            </select>
          </Field>
        )}
        {form.source !== 'dockerfile' && (
          <Field id="build-commands" label="Commands" whole hint="One per line, run as root in a sandbox of the build">
            <textarea
              id="build-commands"
              className="textarea mono"
              value={form.commands}
              onChange={set('commands')}
              spellCheck={false}
              placeholder="pip install numpy"
            />
          </Field>
        )}
        {text('start', 'Start command', 'Optional: runs in each new sandbox')}
        {form.start && text('ready', 'Ready command', 'Succeeds once the start command is ready')}
      </div>
    </ConfirmDialog>
  )
}
