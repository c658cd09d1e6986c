import { useEffect, useRef } from 'react'
import { basicSetup, EditorView } from 'codemirror'
import { HighlightStyle, syntaxHighlighting } from '@codemirror/language'
import { MergeView, unifiedMergeView } from '@codemirror/merge'
import { Compartment, EditorState, type Extension } from '@codemirror/state'
import { keymap } from '@codemirror/view'
import { tags } from '@lezer/highlight'
import { languageOf } from './languages'

const theme = EditorView.theme({
  '&': { height: '100%', fontSize: '12.5px', backgroundColor: 'var(--surface)', color: 'var(--text)' },
  '.cm-scroller': { fontFamily: 'var(--mono)', lineHeight: '1.55' },
  '.cm-gutters': { backgroundColor: 'var(--sunken)', color: 'var(--muted)', borderRight: '1px solid var(--line)' },
  '.cm-activeLine, .cm-activeLineGutter': { backgroundColor: 'color-mix(in srgb, var(--accent) 7%, transparent)' },
  '.cm-cursor': { borderLeftColor: 'var(--text)' },
  '&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground': {
    backgroundColor: 'color-mix(in srgb, var(--accent) 28%, transparent)',
  },
  '.cm-panels': { backgroundColor: 'var(--sunken)', color: 'var(--text)' },
  '.cm-specialChar': { color: 'var(--bad)' },
  '.cm-foldPlaceholder': { backgroundColor: 'var(--sunken)', color: 'var(--muted)', borderColor: 'var(--line)' },
})

const colours = HighlightStyle.define([
  { tag: [tags.keyword, tags.modifier, tags.operatorKeyword], color: 'var(--accent)' },
  { tag: [tags.string, tags.special(tags.string), tags.regexp], color: 'var(--good)' },
  { tag: [tags.comment, tags.meta], color: 'var(--muted)', fontStyle: 'italic' },
  { tag: [tags.number, tags.bool, tags.null, tags.atom], color: 'var(--warn)' },
  { tag: [tags.heading, tags.strong], fontWeight: 'bold' },
  { tag: [tags.propertyName, tags.attributeName, tags.tagName], color: 'var(--idle)' },
  { tag: tags.invalid, color: 'var(--bad)' },
])

const common = (label: string): Extension => [
  basicSetup,
  theme,
  syntaxHighlighting(colours),
  EditorView.contentAttributes.of({ 'aria-label': label, spellcheck: 'false' }),
]

/** Loads the language of a file and enables it in the editors. */
function highlight(name: string, language: Compartment, views: EditorView[]) {
  void languageOf(name).then((extension) => {
    if (!extension) return
    for (const view of views) view.dispatch({ effects: language.reconfigure(extension) })
  })
}

/** Editor of a text. A new `text` replaces the content. `draft` is the content with earlier edits. */
export function CodeEditor({
  name,
  label,
  text,
  draft,
  onChange,
  onSave,
}: {
  name: string
  label: string
  text: string
  draft?: string
  onChange: (text: string) => void
  onSave: () => void
}) {
  const frame = useRef<HTMLDivElement>(null)
  const current = useRef({ onChange, onSave })
  current.current = { onChange, onSave }
  const first = useRef(draft)
  useEffect(() => {
    if (!frame.current) return
    const language = new Compartment()
    const save = () => {
      current.current.onSave()
      return true
    }
    const view = new EditorView({
      parent: frame.current,
      doc: first.current ?? text,
      extensions: [
        keymap.of([{ key: 'Mod-s', run: save, preventDefault: true }]),
        common(label),
        language.of([]),
        EditorView.updateListener.of((update) => {
          if (update.docChanged) current.current.onChange(update.state.doc.toString())
        }),
      ],
    })
    first.current = undefined
    highlight(name, language, [view])
    return () => view.destroy()
  }, [name, label, text])
  return <div className="editor" ref={frame} />
}

/** Differences between the file in the sandbox and the version of the user, which can be edited. */
export function Differences({
  name,
  theirs,
  mine,
  onChange,
}: {
  name: string
  theirs: string
  mine: string
  onChange: (text: string) => void
}) {
  const frame = useRef<HTMLDivElement>(null)
  const change = useRef(onChange)
  change.current = onChange
  // The text of the user is read once: the editor holds it afterwards.
  const first = useRef(mine)
  useEffect(() => {
    if (!frame.current) return
    const language = new Compartment()
    const own = [
      common('Your version'),
      language.of([]),
      EditorView.updateListener.of((update) => {
        if (update.docChanged) change.current(update.state.doc.toString())
      }),
    ]
    // Two columns need space.
    if (frame.current.clientWidth < 560) {
      const view = new EditorView({
        parent: frame.current,
        doc: first.current,
        extensions: [own, unifiedMergeView({ original: theirs, mergeControls: false })],
      })
      highlight(name, language, [view])
      return () => view.destroy()
    }
    const view = new MergeView({
      parent: frame.current,
      a: {
        doc: theirs,
        extensions: [common('In the sandbox'), language.of([]), EditorState.readOnly.of(true)],
      },
      b: { doc: first.current, extensions: own },
      collapseUnchanged: { margin: 3, minSize: 6 },
    })
    highlight(name, language, [view.a, view.b])
    return () => view.destroy()
  }, [name, theirs])
  return <div className="differences" ref={frame} />
}

/** Two texts side by side, with their differences. */
export function SideBySide({ name, before, after }: { name: string; before: string; after: string }) {
  const frame = useRef<HTMLDivElement>(null)
  useEffect(() => {
    if (!frame.current) return
    const language = new Compartment()
    const side = (label: string) => [common(label), language.of([]), EditorState.readOnly.of(true)]
    // Two columns need space.
    if (frame.current.clientWidth < 560) {
      const view = new EditorView({
        parent: frame.current,
        doc: after,
        extensions: [side('After'), unifiedMergeView({ original: before, mergeControls: false })],
      })
      highlight(name, language, [view])
      return () => view.destroy()
    }
    const view = new MergeView({
      parent: frame.current,
      a: { doc: before, extensions: side('Before') },
      b: { doc: after, extensions: side('After') },
      collapseUnchanged: { margin: 3, minSize: 6 },
    })
    highlight(name, language, [view.a, view.b])
    return () => view.destroy()
  }, [name, before, after])
  return <div className="differences" ref={frame} />
}
