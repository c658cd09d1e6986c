import type { Extension } from '@codemirror/state'
import { StreamLanguage, type StreamParser } from '@codemirror/language'

type Load = () => Promise<Extension>

const stream = (load: () => Promise<StreamParser<unknown>>) => async () => StreamLanguage.define(await load())

const javascript = (options: { jsx?: boolean; typescript?: boolean }) => async () =>
  (await import('@codemirror/lang-javascript')).javascript(options)
const yaml: Load = async () => (await import('@codemirror/lang-yaml')).yaml()
const shell = stream(async () => (await import('@codemirror/legacy-modes/mode/shell')).shell)
const toml = stream(async () => (await import('@codemirror/legacy-modes/mode/toml')).toml)

/** Languages by the extension of the file. Each is a chunk that is loaded on use. */
const byExtension: Record<string, Load> = {
  js: javascript({ jsx: true }),
  cjs: javascript({}),
  mjs: javascript({}),
  jsx: javascript({ jsx: true }),
  ts: javascript({ typescript: true }),
  tsx: javascript({ jsx: true, typescript: true }),
  py: async () => (await import('@codemirror/lang-python')).python(),
  json: async () => (await import('@codemirror/lang-json')).json(),
  html: async () => (await import('@codemirror/lang-html')).html(),
  svg: async () => (await import('@codemirror/lang-html')).html(),
  xml: async () => (await import('@codemirror/lang-html')).html(),
  css: async () => (await import('@codemirror/lang-css')).css(),
  md: async () => (await import('@codemirror/lang-markdown')).markdown(),
  rs: async () => (await import('@codemirror/lang-rust')).rust(),
  sql: async () => (await import('@codemirror/lang-sql')).sql(),
  go: stream(async () => (await import('@codemirror/legacy-modes/mode/go')).go),
  c: stream(async () => (await import('@codemirror/legacy-modes/mode/clike')).c),
  h: stream(async () => (await import('@codemirror/legacy-modes/mode/clike')).c),
  cpp: stream(async () => (await import('@codemirror/legacy-modes/mode/clike')).cpp),
  java: stream(async () => (await import('@codemirror/legacy-modes/mode/clike')).java),
  rb: stream(async () => (await import('@codemirror/legacy-modes/mode/ruby')).ruby),
  yaml,
  yml: yaml,
  toml,
  conf: toml,
  ini: toml,
  sh: shell,
  bash: shell,
}
const dockerfile = stream(async () => (await import('@codemirror/legacy-modes/mode/dockerfile')).dockerFile)

/** Returns the language of a file. `undefined` if the name has no known extension. */
export async function languageOf(name: string): Promise<Extension | undefined> {
  if (/^(docker|container)file/i.test(name)) return dockerfile()
  if (/^\.(bash|profile|zsh)/.test(name)) return shell()
  const load = byExtension[name.split('.').pop()?.toLowerCase() ?? '']
  // Without the chunk, the text is shown without colours.
  return load?.().catch(() => undefined)
}
