import type { Command } from './commands'
import { pythonString, pythonValue, shellWord } from './command-text'

export interface Build {
  name: string
  /** Text of a Dockerfile. It replaces the other sources. */
  dockerfile?: string
  fromImage?: string
  fromTemplate?: string
  /** Commands that run as root, one per step. */
  commands: string[]
  start?: string
  /** Command that succeeds once the start command is ready. */
  ready?: string
}

/** Writes the build as a Dockerfile. A command is one line. */
function asDockerfile(build: Build): string {
  if (build.dockerfile !== undefined) return build.dockerfile
  const lines = [`FROM ${build.fromImage ?? build.fromTemplate}`]
  if (build.commands.length > 0) {
    lines.push('USER root', ...build.commands.map((command) => `RUN ${command}`), 'USER user')
  }
  return `${lines.join('\n')}\n`
}

function python(build: Build): string {
  let source: string
  if (build.dockerfile !== undefined) source = `.from_dockerfile(${pythonString(build.dockerfile)})`
  else if (build.fromImage !== undefined) source = `.from_image(${pythonString(build.fromImage)})`
  else source = `.from_template(${pythonString(build.fromTemplate ?? '')})`
  const lines = [`template = Template()${source}`]
  for (const command of build.commands) {
    lines.push(`template = template.run_cmd(${pythonString(command)}, user="root")`)
  }
  if (build.start) {
    lines.push(
      `template = template.set_start_cmd(${pythonString(build.start)}, ${pythonString(build.ready ?? 'true')})`,
    )
  }
  return `from e2b import Template\n\n${lines.join('\n')}\nTemplate.build(template, ${pythonString(build.name)})`
}

const path = (template: string) => `/templates/${encodeURIComponent(template)}`

/** The commands of all actions on templates. */
export const templateCommands = {
  /** `body` is the request that starts the build. */
  build(build: Build, body: unknown): Command {
    const words = ['template', 'build', '--file=-', `--name=${build.name}`]
    if (build.start) words.push(`--start=${build.start}`, `--ready-command=${build.ready ?? 'true'}`)
    const url = '"$E2B_API_URL"'
    const key = '-H "X-API-KEY: $E2B_API_KEY"'
    const curl = [
      `build=$(curl --fail-with-body ${key} ${url}/v3/templates --json ${shellWord(JSON.stringify({ name: build.name }))})`,
      `curl --fail-with-body ${key} ${url}"$(jq -r '"/v2/templates/\\(.templateID)/builds/\\(.buildID)"' <<<"$build")" ` +
        `--json ${shellWord(JSON.stringify(body))}`,
    ]
    return {
      jiffy: [...words, '.'],
      input: asDockerfile(build),
      python: python(build),
      curl: curl.join('\n'),
      method: 'POST',
      path: '/v3/templates',
    }
  },
  /** Builds a stock template. The command line builds it on the host on which it runs. */
  recipe: (name: string): Command => ({
    jiffy: ['template', 'build', name],
    method: 'POST',
    path: `/recipes/${encodeURIComponent(name)}/build`,
  }),
  recipeLog: (name: string): Command => ({
    method: 'GET',
    path: `/recipes/${encodeURIComponent(name)}/build`,
  }),
  /** The command line shows the log of a build only while it starts the build. */
  log: (template: string, build: string): Command => ({
    method: 'GET',
    path: `${path(template)}/builds/${encodeURIComponent(build)}/logs`,
  }),
  remove: (template: string, name: string): Command => ({
    jiffy: ['template', 'rm', '--', name],
    method: 'DELETE',
    path: path(template),
  }),
  publish: (template: string, name: string, isPublic: boolean): Command => ({
    jiffy: isPublic ? ['template', 'publish', '--', name] : undefined,
    method: 'PATCH',
    path: `/v2${path(template)}`,
    body: { public: isPublic },
  }),
  /** The command line tags only templates of its own host, so that tags have no `jiffy` command. */
  addTag(target: string, tag: string): Command {
    return {
      python: `from e2b import Template\n\nTemplate.assign_tags(${pythonString(target)}, ${pythonValue([tag])})`,
      method: 'POST',
      path: '/templates/tags',
      body: { target, tags: [tag] },
    }
  },
  removeTag: (name: string, tag: string): Command => ({
    python: `from e2b import Template\n\nTemplate.remove_tags(${pythonString(name)}, ${pythonValue([tag])})`,
    method: 'DELETE',
    path: '/templates/tags',
    body: { name, tags: [tag] },
  }),
}
