import { useId, useState } from 'react'
import { curlLine, jiffyLine, pythonLines } from '../lib/command-text'
import type { Command } from '../lib/commands'
import { Button, CodeBlock } from './controls'

/** Shows an action as the commands that do the same. */
export function AsCommand({ command }: { command: Command | Command[] }) {
  const [open, setOpen] = useState(false)
  const id = useId()
  const list = Array.isArray(command) ? command : [command]
  const join = (lines: (string | undefined)[]) =>
    lines.every((line) => line !== undefined) ? lines.join('\n') : undefined
  const forms: [string, string | undefined][] = [
    ['jiffy', join(list.map(jiffyLine))],
    ['Python', pythonLines(list)],
    ['curl', join(list.map(curlLine))],
  ]
  return (
    <div className="stack">
      <div>
        <Button
          look="ghost"
          small
          icon="command"
          aria-expanded={open}
          aria-controls={id}
          onClick={() => setOpen(!open)}>
          As a command
        </Button>
      </div>
      <div id={id} className="stack" hidden={!open}>
        {open &&
          forms.map(([name, text]) => (
            <div key={name} className="field">
              <span className="label">{name}</span>
              {text ? <CodeBlock text={text} /> : <span className="hint">No equivalent command</span>}
            </div>
          ))}
      </div>
    </div>
  )
}
