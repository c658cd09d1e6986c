/** Returns whether a key press belongs to a text field, a terminal, a dialog or a menu, or has a modifier key. */
export function isTyping(event: KeyboardEvent): boolean {
  if (event.ctrlKey || event.metaKey || event.altKey) return true
  const target = event.target as HTMLElement | null
  const controls = 'input:not([type=checkbox]), textarea, select, [contenteditable], .xterm, [role=dialog], [role=menu]'
  return !!target?.closest(controls)
}
