import { FitAddon } from '@xterm/addon-fit'
import { SearchAddon } from '@xterm/addon-search'
import { type ITheme, Terminal } from '@xterm/xterm'
import { OutputQueue } from './output-queue'
import { type Ending, live } from './socket'

/** Output after which the terminal acknowledges, so that the daemon reads more. */
const ACKNOWLEDGE = 32 * 1024

const themes: Record<'light' | 'dark', ITheme> = {
  dark: {
    background: '#0d1016',
    foreground: '#dfe4ee',
    cursor: '#8fa5ff',
    selectionBackground: '#36447a',
    black: '#1b202b',
    red: '#ff8f86',
    green: '#63d196',
    yellow: '#f0b65c',
    blue: '#8fa5ff',
    magenta: '#d6a2f5',
    cyan: '#6fd3e3',
    white: '#dfe4ee',
    brightBlack: '#7b8699',
    brightRed: '#ffb0aa',
    brightGreen: '#8ee4b5',
    brightYellow: '#f8d08f',
    brightBlue: '#b3c1ff',
    brightMagenta: '#e6c4fb',
    brightCyan: '#a0e6f0',
    brightWhite: '#ffffff',
  },
  light: {
    background: '#ffffff',
    foreground: '#1d2330',
    cursor: '#3451d1',
    selectionBackground: '#cfd8fb',
    black: '#1d2330',
    red: '#b3261e',
    green: '#15733f',
    yellow: '#8a5300',
    blue: '#3451d1',
    magenta: '#8a2cb0',
    cyan: '#0c6a7d',
    white: '#5a6373',
    brightBlack: '#565f70',
    brightRed: '#c5362e',
    brightGreen: '#1b8049',
    brightYellow: '#935a04',
    brightBlue: '#4a65df',
    brightMagenta: '#9d45c0',
    brightCyan: '#147488',
    brightWhite: '#3b4352',
  },
}

export interface PaneEvents {
  onOpened: (terminal: string) => void
  onEnding: (ending: Ending) => void
  onFailed: (message: string) => void
  onConnection: (isConnected: boolean) => void
  /** Shows a dialog that confirms the paste of several lines. */
  confirmPaste: (text: string, paste: () => void) => void
  /** Shows a dialog that confirms a link of the guest's output. */
  confirmLink: (url: string) => void
}

export interface PaneSettings {
  sandbox: string
  /** Terminal to attach. `undefined` to start a shell. */
  terminal?: string
  user?: string
  shell?: string
  fontSize: number
  screenReader: boolean
}

/** A terminal in the page: xterm, connected to a stream of the daemon. */
export class Pane {
  readonly term: Terminal
  readonly search = new SearchAddon()
  private readonly fit = new FitAddon()
  private readonly stream: number
  private readonly output: OutputQueue
  private readonly observer: ResizeObserver
  private readonly scheme = matchMedia('(prefers-color-scheme: dark)')
  private terminal: string | undefined
  private unacknowledged = 0

  constructor(
    element: HTMLElement,
    settings: PaneSettings,
    private readonly events: PaneEvents,
  ) {
    this.terminal = settings.terminal
    this.term = new Terminal({
      fontFamily: "ui-monospace, 'SF Mono', 'Cascadia Code', 'JetBrains Mono', Menlo, Consolas, monospace",
      fontSize: settings.fontSize,
      lineHeight: 1.2,
      scrollback: 10_000,
      cursorBlink: false,
      convertEol: false,
      screenReaderMode: settings.screenReader,
      theme: this.theme(),
      allowProposedApi: true,
      minimumContrastRatio: 4.5,
      linkHandler: {
        activate: (_, url) => {
          if (/^https?:\/\//i.test(url)) events.confirmLink(url)
        },
      },
    })
    this.term.loadAddon(this.fit)
    this.term.loadAddon(this.search)
    // Sequences by which a guest could change the clipboard or the title are ignored.
    for (const code of [0, 1, 2, 52]) this.term.parser.registerOscHandler(code, () => true)
    this.output = new OutputQueue(this.term, (bytes) => this.acknowledge(bytes))
    this.term.open(element)
    this.fit.fit()
    this.term.attachCustomKeyEventHandler((event) => this.onKey(event))
    this.term.onData((text) => live.input(this.stream, new TextEncoder().encode(text)))
    this.term.onBinary((text) =>
      live.input(
        this.stream,
        Uint8Array.from(text, (c) => c.charCodeAt(0)),
      ),
    )
    this.term.onResize(({ cols, rows }) => live.send({ type: 'resize', stream: this.stream, cols, rows }))
    // xterm would paste without a question.
    element.addEventListener('paste', this.onPaste, true)
    this.observer = new ResizeObserver(() => {
      if (element.clientHeight > 0) this.fit.fit()
    })
    this.observer.observe(element)
    this.scheme.addEventListener('change', this.onTheme)
    const { sandbox, user, shell } = settings
    this.stream = live.register({
      connected: () => {
        events.onConnection(true)
        const size = { cols: this.term.cols, rows: this.term.rows }
        if (this.terminal) live.send({ type: 'attach', stream: this.stream, sandbox, terminal: this.terminal, ...size })
        else live.send({ type: 'open', stream: this.stream, sandbox, user, shell, ...size })
      },
      opened: (terminal) => {
        this.terminal = terminal
        this.unacknowledged = 0
        this.output.reset()
        // The retained output follows.
        this.term.reset()
        events.onOpened(terminal)
      },
      output: (bytes) => this.output.push(bytes),
      ended: (ending) => events.onEnding(ending),
      failed: (message) => events.onFailed(message),
      disconnected: () => events.onConnection(false),
    })
  }

  private acknowledge(bytes: number) {
    this.unacknowledged += bytes
    if (this.unacknowledged < ACKNOWLEDGE) return
    live.send({ type: 'ack', stream: this.stream, bytes: this.unacknowledged })
    this.unacknowledged = 0
  }

  private theme(): ITheme {
    const chosen = document.documentElement.dataset.theme
    return themes[(chosen ?? (this.scheme.matches ? 'dark' : 'light')) === 'dark' ? 'dark' : 'light']
  }

  private readonly onTheme = () => {
    this.term.options.theme = this.theme()
  }

  private readonly onPaste = (event: ClipboardEvent) => {
    event.preventDefault()
    event.stopPropagation()
    this.paste(event.clipboardData?.getData('text') ?? '')
  }

  private onKey(event: KeyboardEvent): boolean {
    if (event.type !== 'keydown' || !event.ctrlKey || !event.shiftKey) return true
    if (event.code === 'KeyC') {
      event.preventDefault()
      this.copy()
      return false
    }
    // The browser then sends a paste event.
    return event.code !== 'KeyV'
  }

  /** Pastes a text, after a question if it has several lines. */
  paste(text: string) {
    if (!text) return
    const paste = () => this.term.paste(text)
    if (/[\r\n]/.test(text.trimEnd())) this.events.confirmPaste(text, paste)
    else paste()
  }

  copy() {
    const text = this.term.getSelection()
    if (text) void navigator.clipboard.writeText(text).catch(() => {})
  }

  setFontSize(size: number) {
    this.term.options.fontSize = size
    this.fit.fit()
  }

  setScreenReader(on: boolean) {
    this.term.options.screenReaderMode = on
  }

  /** Ends the shell. */
  end() {
    live.send({ type: 'end', stream: this.stream })
  }

  dispose(element: HTMLElement) {
    this.observer.disconnect()
    this.scheme.removeEventListener('change', this.onTheme)
    element.removeEventListener('paste', this.onPaste, true)
    live.unregister(this.stream)
    this.output.close()
    this.term.dispose()
  }
}
