import type { Schemas } from '../api/client'
import { shellWord } from './command-text'

type Step = Schemas['BuildStep']

/** Content of a Dockerfile that needs no files: one stage with `RUN`, `ENV`, `WORKDIR` and `USER`. */
export interface Dockerfile {
  from: string
  steps: Step[]
}

/** Error at a line of a Dockerfile. */
export class DockerfileError extends Error {
  constructor(
    readonly line: number,
    message: string,
  ) {
    super(`line ${line}: ${message}`)
  }
}

interface Instruction {
  line: number
  name: string
  rest: string
}

/** Joins continued lines and removes comments. */
function instructions(text: string): Instruction[] {
  const found: Instruction[] = []
  let current: { line: number; text: string } | undefined
  text.split('\n').forEach((raw, index) => {
    const line = raw.replace(/\r$/, '')
    if (/^\s*#/.test(line) || (current && line.trim() === '')) return
    const isContinued = /\\\s*$/.test(line)
    const part = isContinued ? line.replace(/\\\s*$/, '') : line
    current = current ? { ...current, text: current.text + part } : { line: index + 1, text: part }
    if (isContinued) return
    add(current)
    current = undefined
  })
  if (current) add(current)
  return found

  function add({ line, text }: { line: number; text: string }) {
    const match = /^\s*(\S+)\s*([\s\S]*)$/.exec(text)
    if (match?.[1]) found.push({ line, name: match[1].toUpperCase(), rest: (match[2] ?? '').trim() })
  }
}

/** Parses the words of the JSON form. `undefined` if the text has another form. */
function jsonWords(text: string): string[] | undefined {
  if (!text.startsWith('[')) return undefined
  try {
    const words: unknown = JSON.parse(text)
    return Array.isArray(words) && words.every((w) => typeof w === 'string') ? words : undefined
  } catch {
    return undefined
  }
}

/** Splits `KEY="a b" OTHER=c` into words, without quotes. */
function quotedWords(text: string): string[] {
  const words: string[] = []
  for (const match of text.matchAll(/(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+/g)) {
    words.push(
      match[0].replace(
        /\\(.)|"((?:[^"\\]|\\.)*)"|'([^']*)'/g,
        (_, escaped?: string, double?: string, single?: string) =>
          escaped !== undefined ? escaped : double !== undefined ? double.replace(/\\(["\\$])/g, '$1') : (single ?? ''),
      ),
    )
  }
  return words
}

function environment({ line, rest }: Instruction): string[] {
  const old = /^([^\s=]+)\s+([\s\S]+)$/.exec(rest)
  if (old?.[1] && old[2] !== undefined) return [old[1], old[2]]
  return quotedWords(rest).flatMap((word) => {
    const at = word.indexOf('=')
    if (at < 1) throw new DockerfileError(line, 'ENV requires KEY=value')
    return [word.slice(0, at), word.slice(at + 1)]
  })
}

const elsewhere = 'is not supported in this form: use `jiffy template build DIRECTORY`'

/** Parses a Dockerfile. */
export function parseDockerfile(text: string): Dockerfile {
  let from: string | undefined
  const steps: Step[] = []
  for (const instruction of instructions(text)) {
    const { line, name, rest } = instruction
    if (name === 'FROM') {
      if (from !== undefined) throw new DockerfileError(line, `a second stage ${elsewhere}`)
      const words = rest.split(/\s+/).filter((word) => !word.startsWith('--'))
      if (!words[0] || words[0].includes('$')) throw new DockerfileError(line, 'FROM requires an image or a template')
      from = words[0]
      continue
    }
    if (from === undefined) throw new DockerfileError(line, 'the first instruction must be FROM')
    if (rest === '') throw new DockerfileError(line, `${name} requires an argument`)
    if (name === 'RUN') {
      if (/^--/.test(rest) || /<<-?["']?\w/.test(rest))
        throw new DockerfileError(line, `this option of RUN ${elsewhere}`)
      const words = jsonWords(rest)
      steps.push({ type: 'RUN', args: [words ? words.map(shellWord).join(' ') : rest] })
    } else if (name === 'ENV') {
      steps.push({ type: 'ENV', args: environment(instruction) })
    } else if (name === 'WORKDIR' || name === 'USER') {
      if (rest.includes('$')) throw new DockerfileError(line, `a variable in ${name} ${elsewhere}`)
      steps.push({ type: name, args: [rest] })
    } else if (!['LABEL', 'EXPOSE', 'MAINTAINER', 'STOPSIGNAL', 'HEALTHCHECK', 'CMD', 'ENTRYPOINT'].includes(name)) {
      throw new DockerfileError(line, `${name} ${elsewhere}`)
    }
  }
  if (from === undefined) throw new DockerfileError(1, 'FROM is missing')
  // Like Docker, instructions start as root in the root directory. Sandboxes have the usual user.
  const has = (type: Step['type']) => steps.some((step) => step.type === type)
  const end: Step[] = []
  if (!has('USER')) end.push({ type: 'USER', args: ['user'] })
  if (!has('WORKDIR')) end.push({ type: 'WORKDIR', args: ['/home/user'] })
  return { from, steps: [{ type: 'USER', args: ['root'] }, { type: 'WORKDIR', args: ['/'] }, ...steps, ...end] }
}
