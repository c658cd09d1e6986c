import { type ButtonHTMLAttributes, type ReactNode, useEffect, useRef, useState } from 'react'
import { Dialog as RadixDialog, DropdownMenu } from 'radix-ui'
import { CallError, messageOf } from '../api/client'
import { visible } from '../lib/visible'
import { localTime, utcTime } from '../lib/format'
import { Icon, type IconName } from './icons'

type ButtonProps = ButtonHTMLAttributes<HTMLButtonElement> & {
  icon?: IconName
  look?: 'primary' | 'danger' | 'ghost' | 'primary danger'
  small?: boolean
  busy?: boolean
  /** Name of a button that shows only its icon. */
  label?: string
}

export function Button({ icon, look, small, busy, label, children, className, ...rest }: ButtonProps) {
  const classes = ['button', look, small && 'small', !children && 'icon', className]
  return (
    <button
      type="button"
      {...rest}
      className={classes.filter(Boolean).join(' ')}
      aria-label={children ? rest['aria-label'] : label}
      title={rest.title ?? label}
      disabled={rest.disabled || busy}
      aria-busy={busy || undefined}>
      {busy ? <span className="spinner" aria-hidden="true" /> : icon && <Icon name={icon} />}
      {children}
    </button>
  )
}

export function Time({ at }: { at: number | string | null | undefined }) {
  if (at == null) return <>–</>
  const ms = typeof at === 'string' ? Date.parse(at) : at
  if (!Number.isFinite(ms)) return <>–</>
  return (
    <time dateTime={new Date(ms).toISOString()} title={utcTime(ms)}>
      {localTime(ms)}
    </time>
  )
}

export function Copy({ text, label = 'Copy', small = true }: { text: string; label?: string; small?: boolean }) {
  const [done, setDone] = useState(false)
  useEffect(() => {
    if (!done) return
    const timer = setTimeout(() => setDone(false), 1500)
    return () => clearTimeout(timer)
  }, [done])
  const copy = () =>
    void navigator.clipboard.writeText(text).then(
      () => setDone(true),
      () => {},
    )
  return (
    <Button look="ghost" small={small} icon={done ? 'check' : 'copy'} label={done ? 'Copied' : label} onClick={copy} />
  )
}

export function CopyId({ id, short }: { id: string; short?: boolean }) {
  return (
    <span className="copy-id">
      <code className="truncate" title={id}>
        {short ? id.slice(0, 10) : id}
      </code>
      <Copy text={id} label="Copy the id" />
    </span>
  )
}

export function CodeBlock({ text }: { text: string }) {
  return (
    <div className="code-block">
      <pre tabIndex={0}>{visible(text)}</pre>
      <Copy text={text} />
    </div>
  )
}

export function Dialog({
  title,
  onClose,
  wide,
  isLocked,
  children,
  description,
}: {
  title: string
  onClose: () => void
  wide?: boolean
  /** True if a click outside and Escape do not close the dialog. */
  isLocked?: boolean
  description?: ReactNode
  children: ReactNode
}) {
  return (
    <RadixDialog.Root
      open
      onOpenChange={(open) => {
        if (!open) onClose()
      }}>
      <RadixDialog.Portal>
        <RadixDialog.Overlay className="overlay" />
        <RadixDialog.Content
          className={`dialog${wide ? ' wide' : ''}`}
          aria-describedby={undefined}
          onEscapeKeyDown={(event) => isLocked && event.preventDefault()}
          onPointerDownOutside={(event) => isLocked && event.preventDefault()}>
          <div className="row spread">
            <RadixDialog.Title asChild>
              <h2>{title}</h2>
            </RadixDialog.Title>
            {!isLocked && (
              <RadixDialog.Close asChild>
                <Button look="ghost" small icon="kill" label="Close" />
              </RadixDialog.Close>
            )}
          </div>
          {description && <div className="muted">{description}</div>}
          {children}
        </RadixDialog.Content>
      </RadixDialog.Portal>
    </RadixDialog.Root>
  )
}

export interface MenuEntry {
  label: string
  icon?: IconName
  danger?: boolean
  disabled?: boolean
  onSelect: () => void
}

type MenuEntries = (MenuEntry | 'line')[]

/** A menu that a button opens. A function creates the entries when the menu is opened. */
export function Menu({
  label,
  entries,
  trigger,
}: {
  label: string
  entries: MenuEntries | (() => MenuEntries)
  trigger?: ReactNode
}) {
  // Tables have a menu in each row. Until its first use, it consists of its button only, which takes
  // less time to draw.
  const [use, setUse] = useState<'mouse' | 'keyboard'>()
  const button = { look: 'ghost', small: true, icon: 'more', label } as const
  if (!trigger && !use) {
    return (
      <Button
        {...button}
        aria-haspopup="menu"
        aria-expanded={false}
        // Clicks by the keyboard have no count.
        onClick={(event) => setUse(event.detail === 0 ? 'keyboard' : 'mouse')}
      />
    )
  }
  return (
    <DropdownMenu.Root modal={false} defaultOpen={use !== undefined}>
      <DropdownMenu.Trigger asChild>{trigger ?? <Button {...button} />}</DropdownMenu.Trigger>
      <DropdownMenu.Portal>
        <DropdownMenu.Content className="menu" align="end" sideOffset={4} aria-label={label}>
          <MenuItems entries={entries} isFirstFocused={use === 'keyboard'} />
        </DropdownMenu.Content>
      </DropdownMenu.Portal>
    </DropdownMenu.Root>
  )
}

function MenuItems({
  entries,
  isFirstFocused,
}: {
  entries: MenuEntries | (() => MenuEntries)
  isFirstFocused: boolean
}) {
  const first = useRef<HTMLDivElement>(null)
  useEffect(() => {
    if (isFirstFocused) first.current?.focus()
  }, [isFirstFocused])
  const list = typeof entries === 'function' ? entries() : entries
  return list.map((entry, index) =>
    entry === 'line' ? (
      <DropdownMenu.Separator key={index} className="menu-line" />
    ) : (
      <DropdownMenu.Item
        key={entry.label}
        ref={index === 0 ? first : undefined}
        className={`menu-item${entry.danger ? ' danger' : ''}`}
        disabled={entry.disabled}
        onSelect={entry.onSelect}>
        {entry.icon && <Icon name={entry.icon} />}
        {entry.label}
      </DropdownMenu.Item>
    ),
  )
}

/** The complete error of a call, selectable, with a retry. */
export function Problem({ error, onRetry, title }: { error: unknown; onRetry?: () => void; title?: string }) {
  const code = error instanceof CallError ? error.code : undefined
  const message = messageOf(error)
  return (
    <div className="problem-box" role="alert">
      <strong>{title ?? 'The request failed'}</strong>
      <pre>
        {visible(message)}
        {code ? `\nerror_code: ${code}` : ''}
      </pre>
      {onRetry && (
        <Button small icon="refresh" onClick={onRetry}>
          Retry
        </Button>
      )}
    </div>
  )
}

/** A state without content. `isPage` if the page has no other heading. */
export function Empty({
  title,
  command,
  isPage,
  children,
}: {
  title: string
  command?: string
  isPage?: boolean
  children?: ReactNode
}) {
  return (
    <div className="empty">
      {isPage ? <h1>{title}</h1> : <h2>{title}</h2>}
      {children}
      {command && <pre className="mono">{command}</pre>}
    </div>
  )
}

/** Placeholder rows. They appear after 200 ms, and have the height of the content. */
export function Skeleton({ rows = 6, height = 22 }: { rows?: number; height?: number }) {
  return (
    <div className="stack" aria-busy="true" aria-label="Loading">
      {Array.from({ length: rows }, (_, i) => (
        <div key={i} className="skeleton" style={{ height }} />
      ))}
    </div>
  )
}

export function Field({
  label,
  hint,
  problem,
  whole,
  children,
  id,
}: {
  label: string
  id: string
  hint?: ReactNode
  problem?: string
  whole?: boolean
  children: ReactNode
}) {
  return (
    <div className={`field${whole ? ' whole' : ''}`}>
      <label htmlFor={id}>{label}</label>
      {children}
      {problem ? (
        <span className="problem" role="alert">
          {visible(problem)}
        </span>
      ) : (
        hint && <span className="hint">{hint}</span>
      )}
    </div>
  )
}

export function Meter({ used, total, label }: { used: number; total: number; label: string }) {
  const share = total > 0 ? Math.min(1, used / total) : 0
  return (
    <div
      className="meter"
      role="meter"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={Math.round(share * 100)}
      data-high={share > 0.85}>
      <span style={{ width: `${share * 100}%` }} />
    </div>
  )
}
