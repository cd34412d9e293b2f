import { createContext, useContext } from "react";

/**
 * The window that tips, menus and popovers belong to; null for the page itself. What lies outside an open window is
 * behind it and cannot be reached.
 */
export const PortalHost = createContext<HTMLElement | null>(null);

/** Where a tip, menu or popover is put. */
export function usePortalHost(): HTMLElement | undefined {
  return useContext(PortalHost) ?? undefined;
}

/** Closes a window on Escape, also while a tip is shown in it; a menu in it takes the key for itself. */
export function closeOnEscape(onClose: () => void) {
  return (event: React.KeyboardEvent) => {
    if (event.key !== "Escape" || (event.target as Element).closest('[role="menu"]')) return;
    event.preventDefault();
    event.stopPropagation();
    onClose();
  };
}
