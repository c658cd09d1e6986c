import type { Command } from './commands'

/** Quotes a word for a POSIX shell. */
export function shellWord(word: string): string {
  if (/^[A-Za-z0-9_@%+=:,./-]+$/.test(word)) return word
  return `'${word.replaceAll("'", `'\\''`)}'`
}

/** Quotes a string as a Python literal. */
export function pythonString(text: string): string {
  // A JSON string is a Python literal, except that surrogates and U+007F must be escaped, too.
  return JSON.stringify(text)
    .replace(/[\u007f-\uffff]/g, (unit) => {
      return `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`
    })
    .replace(/\\u(d[89ab]..)\\u(d[c-f]..)/g, (_, high: string, low: string) => {
      const code = 0x10000 + ((parseInt(high, 16) - 0xd800) << 10) + (parseInt(low, 16) - 0xdc00)
      return `\\U${code.toString(16).padStart(8, '0')}`
    })
}

/** Converts a JSON value to a Python literal. */
export function pythonValue(value: unknown): string {
  if (value === null || value === undefined) return 'None'
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (typeof value === 'number') return String(value)
  if (typeof value === 'string') return pythonString(value)
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(', ')}]`
  const pairs = Object.entries(value as object).filter(([, v]) => v !== undefined)
  return `{${pairs.map(([k, v]) => `${pythonString(k)}: ${pythonValue(v)}`).join(', ')}}`
}

/** Returns the line for a shell. `undefined` if the command line has no equivalent. */
export function jiffyLine(command: Command): string | undefined {
  const line = command.jiffy && ['jiffy', ...command.jiffy].map(shellWord).join(' ')
  return line && command.input !== undefined ? `printf %s ${shellWord(command.input)} | ${line}` : line
}

/** Content type of bodies that are text. */
const TEXT = 'text/plain'

/** Returns the call of the API in Python. The package `e2b` depends on `httpx`. */
function pythonCall(command: Command): string {
  const headers: Record<string, string> = command.text === undefined ? {} : { 'content-type': TEXT }
  const words = [
    pythonString(command.method),
    `os.environ["E2B_API_URL"] + ${pythonString(command.path)}`,
    `headers={"X-API-KEY": os.environ["E2B_API_KEY"]${Object.entries(headers).map(([k, v]) => `, ${pythonString(k)}: ${pythonString(v)}`)}}`,
  ]
  if (command.body !== undefined) words.push(`json=${pythonValue(command.body)}`)
  if (command.text !== undefined) words.push(`content=${pythonString(command.text)}.encode()`)
  if (command.form) {
    words.push(`data={"settings": ${pythonString(JSON.stringify(command.form.settings))}}`)
    words.push(`files={"module": open(${pythonString(command.form.file)}, "rb")}`)
  }
  words.push('timeout=None')
  return `httpx.request(\n    ${words.join(',\n    ')},\n).raise_for_status()`
}

/** Returns a program in Python. */
export function pythonLines(commands: Command[]): string {
  const imports: string[] = []
  if (commands.some((command) => !command.python)) imports.push('import os', '', 'import httpx')
  // Statements about templates have imports of their own.
  if (commands.some((command) => command.python?.includes('Sandbox.'))) imports.push('from e2b import Sandbox')
  if (imports.length > 0) imports.push('')
  return [...imports, ...commands.map((command) => command.python ?? pythonCall(command))].join('\n')
}

/** Quotes the name of a file in a form of `curl`. */
const formFile = (name: string) => `module=@"${name.replace(/[\\"]/g, '\\$&')}"`

export function curlLine(command: Command): string {
  if (command.curl) return command.curl
  const words = ['curl', '--fail-with-body']
  if (command.method !== 'GET') words.push('-X', command.method)
  words.push('-H', '"X-API-KEY: $E2B_API_KEY"', `"$E2B_API_URL"${shellWord(command.path)}`)
  if (command.body !== undefined) words.push('--json', shellWord(JSON.stringify(command.body)))
  if (command.text !== undefined) {
    words.push('-H', shellWord(`content-type: ${TEXT}`), '--data-raw', shellWord(command.text))
  }
  if (command.form) {
    words.push('--form-string', shellWord(`settings=${JSON.stringify(command.form.settings)}`))
    words.push('-F', shellWord(formFile(command.form.file)))
  }
  return words.join(' ')
}
