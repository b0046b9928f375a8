"""stub"""
def draw_contest(p): pass
draw_alpha=draw_price=draw_winners=draw_contest
def draw_scaling(p,quick): pass
