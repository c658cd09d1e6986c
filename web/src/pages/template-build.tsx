import { useState } from 'react'
import { api, data, messageOf, type Schemas } from '../api/client'
import { DockerfileError, parseDockerfile } from '../lib/dockerfile'
import { type Build, templateCommands } from '../lib/template-commands'
import { useRecipes, useTemplates } from '../api/queries'
import { useSession } from '../session'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Field } from '../ui/controls'
import { nameOf, RECIPE } from './templates'

type Source = 'dockerfile' | 'image' | 'template' | 'recipe'

/** Texts of the states of recipes. */
const states: Record<Schemas['RecipeState'], string> = {
  missing: 'not built',
  outdated: 'outdated',
  ready: 'up to date',
  building: 'being built',
}

/**
 * Builds a template from the text of a Dockerfile, an image, another template with commands, or the
 * recipe of a stock template.
 */
export function BuildDialog({ onClose, onStarted }: { onClose: () => void; onStarted: (id: string) => void }) {
  const templates = useTemplates().data ?? []
  const { isAdmin } = useSession()
  const recipes = useRecipes(isAdmin)
  const [form, setForm] = useState({
    name: '',
    source: 'dockerfile' as Source,
    dockerfile: 'FROM base\nRUN ',
    image: 'python:3.12',
    template: 'base',
    recipe: 'base',
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
  const isRecipe = form.source === 'recipe'
  const run = async () => {
    if (isRecipe) {
      await api.POST('/recipes/{recipe}/build', { params: { path: { recipe: form.recipe } } })
      setStarted(RECIPE + form.recipe)
      onStarted(RECIPE + form.recipe)
      return
    }
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
      disabled={(!isRecipe && !form.name) || problem !== undefined || started !== undefined}
      command={isRecipe ? templateCommands.recipe(form.recipe) : templateCommands.build(build, body)}
      onClose={onClose}
      run={run}>
      <div className="form-grid">
        {!isRecipe && (
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
        )}
        <Field id="build-source" label="Source">
          <select id="build-source" className="select" value={form.source} onChange={set('source')}>
            <option value="dockerfile">Dockerfile</option>
            <option value="image">Image with commands</option>
            <option value="template">Template with commands</option>
            {isAdmin && <option value="recipe">Recipe of a stock template</option>}
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
        {isRecipe && (
          <Field
            id="build-recipe"
            label="Recipe"
            whole
            problem={recipes.error ? messageOf(recipes.error) : undefined}
            hint="Installs Debian packages on the host, which takes minutes. An up-to-date template is not built again">
            <select id="build-recipe" className="select" value={form.recipe} onChange={set('recipe')}>
              {recipes.data?.map(({ name, from, state }) => (
                <option key={name} value={name}>
                  {visible(name)}
                  {from ? ` (extends ${visible(from)})` : ''}: {states[state]}
                </option>
              ))}
            </select>
          </Field>
        )}
        {(form.source === 'image' || form.source === 'template') && (
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
        {!isRecipe && text('start', 'Start command', 'Optional: runs in each new sandbox')}
        {!isRecipe && form.start && text('ready', 'Ready command', 'Succeeds once the start command is ready')}
      </div>
    </ConfirmDialog>
  )
}
